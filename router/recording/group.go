package recording

import (
	"errors"
	"io"
	"slices"
	"time"
)

// Group lists the files of one recording.
type Group struct {
	Began time.Time // zero for files before version 3
	Files []string  // sorted by name, which is the order of their creation
}

// GroupByRecording groups files by their recording, because a directory may contain files of
// several, and the initial blocks of one recording are meaningless for another. Files before
// version 3 do not identify their recording and form one group. A file that is too short to
// identify its recording forms its own group. An error names a file that is not a recording.
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

// recordingOf returns the number of a file's recording, 0 if the file does not contain it.
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
