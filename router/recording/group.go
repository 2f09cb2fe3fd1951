package recording

import (
	"errors"
	"io"
	"slices"
	"time"
)

// Group is one recording's files.
type Group struct {
	Began time.Time // zero where the files do not say
	Files []string  // in the order of their names, which is that of their beginning
}

// GroupByRecording sorts files by the recording they are part of, for a folder may
// have those of several: what one of them says ranks held at its beginning means
// nothing for another. Files of before version 3 do not say which is theirs and are
// taken for one recording. A file too short to say it stands alone. An error is that
// of a file that is no recording.
func GroupByRecording(paths []string) ([]Group, error) {
	paths = slices.Clone(paths)
	slices.Sort(paths)
	var all []Group
	at := make(map[uint64]int)
	for _, path := range slices.Compact(paths) {
		id, began, err := recordingOf(path)
		short := errors.Is(err, ErrUnfinished) || errors.Is(err, ErrTruncated) || err == io.EOF
		if err != nil && !short {
			return nil, err
		}
		i, known := at[id]
		if !known || short {
			i, all = len(all), append(all, Group{Began: began})
			if !short {
				at[id] = i
			}
		}
		all[i].Files = append(all[i].Files, path)
	}
	return all, nil
}

// recordingOf is the number of a file's recording, 0 where it does not say.
func recordingOf(path string) (id uint64, began time.Time, err error) {
	r, err := Open(path)
	if err != nil {
		return 0, began, err
	}
	defer r.Close()
	var e Entry
	if err := r.Next(&e); err != nil {
		return 0, began, err
	}
	if e.Kind == RecordingInfo {
		return e.Recording, e.At, nil
	}
	return 0, began, nil
}
