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

// FilesOptions of a Files; zero values mean the default.
type FilesOptions struct {
	Dir      string // made when it is not there, mode 0700
	MaxFile  int64  // bytes after which the next file is begun [64 MiB]
	MaxTotal int64  // bytes of all recordings in Dir; the oldest files go first [1 GiB]
}

const (
	filePrefix = "sluice-"
	fileSuffix = ".rec"
	timeLayout = "20060102T150405.000000"
)

// Files is a Sink of files of bounded size, each of which can be read by itself.
// Names are the time of their beginning: sluice-20260102T150405.000000.rec. They
// hold hashes of prompts and are readable by their owner alone.
type Files struct {
	opt      FilesOptions
	file     *os.File
	size     int64
	complete []string // whole files, oldest first
	created  []string
}

// NewFiles makes the directory where need be; the first file is made by the
// first frame.
func NewFiles(opt FilesOptions) (*Files, error) {
	if opt.MaxFile <= 0 {
		opt.MaxFile = 64 << 20
	}
	if opt.MaxTotal <= 0 {
		opt.MaxTotal = 1 << 30
	}
	if err := os.MkdirAll(opt.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("record: cannot make the directory: %w", err)
	}
	probe, err := os.CreateTemp(opt.Dir, ".sluice-probe-*")
	if err != nil {
		return nil, fmt.Errorf("record: cannot write in %q: %w", opt.Dir, err)
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
			return errors.New("record: a file cannot begin with this frame")
		}
		if err := f.begin(); err != nil {
			return err
		}
	}
	n, err := f.file.Write(frame)
	if err != nil {
		// Half a frame is of no use to anybody, and the disk may be full.
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
		return fmt.Errorf("record: cannot make a file: %w", err)
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

// finish ends the file under way.
func (f *Files) finish() error {
	if f.file == nil {
		return nil
	}
	if f.size <= headerSize { // there was no room for a first frame
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

// prune deletes the oldest recordings over the bound, with room for the file
// under way; only files of its own name are touched.
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

// Names is the names of the files made so far, oldest first; some may have gone
// since.
func (f *Files) Names() []string { return f.created }

// Close ends the last file.
func (f *Files) Close() error { return f.finish() }
