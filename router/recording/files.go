package recording

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// FilesOptions configures Files; zero values select the defaults.
type FilesOptions struct {
	Dir      string // created with mode 0700 if it does not exist
	MaxFile  int64  // size in bytes after which a new file is started [64 MiB]
	MaxTotal int64  // total bytes of all recordings in Dir; the oldest files are deleted first [1 GiB]
}

const (
	filePrefix = "sluice-"
	fileSuffix = ".rec"
	timeLayout = "20060102T150405.000000"
)

// Files is a Sink that writes files of bounded size, each readable without the others. A file
// is named after its creation time: sluice-20260102T150405.000000.rec. Files contain hashes of
// prompts and are readable only by their owner.
type Files struct {
	opt      FilesOptions
	file     *os.File
	size     int64
	complete []string // finished files, oldest first
	created  []string
}

// NewFiles creates the directory if necessary. The first frame creates the first file.
func NewFiles(opt FilesOptions) (*Files, error) {
	if opt.MaxFile <= 0 {
		opt.MaxFile = 64 << 20
	}
	if opt.MaxTotal <= 0 {
		opt.MaxTotal = 1 << 30
	}
	if err := os.MkdirAll(opt.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("recording: cannot create the directory: %w", err)
	}
	probe, err := os.CreateTemp(opt.Dir, ".sluice-probe-*")
	if err != nil {
		return nil, fmt.Errorf("recording: cannot write in %q: %w", opt.Dir, err)
	}
	probe.Close()
	os.Remove(probe.Name())
	f := &Files{opt: opt}
	f.complete, err = filepath.Glob(filepath.Join(opt.Dir, filePrefix+"*"+fileSuffix))
	slices.Sort(f.complete)
	return f, err
}

// Frame implements Sink.
func (f *Files) Frame(start bool, frame []byte) error {
	if start && f.file != nil && f.size >= f.opt.MaxFile {
		if err := f.finish(); err != nil {
			return err
		}
	}
	if f.file == nil {
		if !start {
			return errors.New("recording: a file cannot begin with this frame")
		}
		if err := f.begin(); err != nil {
			return err
		}
	}
	n, err := f.file.Write(frame)
	if err != nil {
		// A partial frame is useless, and the disk may be full.
		return errors.Join(err, f.file.Truncate(f.size), f.seek())
	}
	f.size += int64(n)
	return nil
}

func (f *Files) seek() error {
	_, err := f.file.Seek(f.size, io.SeekStart)
	return err
}

func (f *Files) begin() (err error) {
	name := filepath.Join(f.opt.Dir, filePrefix+time.Now().UTC().Format(timeLayout)+fileSuffix)
	if f.file, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return fmt.Errorf("recording: cannot create a file: %w", err)
	}
	f.size = headerSize
	if _, err = f.file.Write(fileHeader()); err != nil {
		f.size = 0
		return errors.Join(err, f.finish())
	}
	f.created = append(f.created, name)
	f.prune()
	return nil
}

// finish completes the current file.
func (f *Files) finish() error {
	if f.file == nil {
		return nil
	}
	if f.size <= headerSize { // the disk had no space for a first frame
		name := f.file.Name()
		f.created = slices.DeleteFunc(f.created, func(m string) bool { return m == name })
		err := errors.Join(f.file.Close(), os.Remove(name))
		f.file = nil
		return err
	}
	_, err := f.file.Write(appendFrame(nil, frameEnd, nil, nil))
	f.complete = append(f.complete, f.file.Name())
	err = errors.Join(err, f.file.Close())
	f.file = nil
	f.prune()
	return err
}

// prune deletes the oldest recordings until the total, including space for the current file, is
// within MaxTotal. It deletes only files that match the naming scheme.
func (f *Files) prune() {
	total := int64(0)
	if f.file != nil {
		total = f.opt.MaxFile
	}
	for i := len(f.complete) - 1; i >= 0; i-- {
		info, err := os.Lstat(f.complete[i])
		if err == nil && info.Mode().IsRegular() {
			total += info.Size()
		}
		if total > f.opt.MaxTotal {
			for _, name := range f.complete[:i+1] {
				if base := filepath.Base(name); strings.HasPrefix(base, filePrefix) && strings.HasSuffix(base, fileSuffix) {
					os.Remove(name)
				}
			}
			f.complete = slices.Clone(f.complete[i+1:])
			return
		}
	}
}

// Names returns the names of the files created so far, oldest first. Some may have been deleted
// since.
func (f *Files) Names() []string { return f.created }

// Close completes the current file.
func (f *Files) Close() error { return f.finish() }
