package recording

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/schedule"
)

// fullDiskSink is a Sink that writes real files and simulates a disk that is full for a while.
type fullDiskSink struct {
	*Files
	full *atomic.Bool
}

func (f fullDiskSink) Frame(start bool, frame []byte) error {
	if f.full.Load() {
		return &os.PathError{Op: "write", Path: "x.rec", Err: syscall.ENOSPC}
	}
	return f.Files.Frame(start, frame)
}

// TestRunForever: after a recording has ended because the disk was full, a new one begins in
// readable files once there is space, but not after Close.
func TestRunForever(t *testing.T) {
	dir := t.TempDir()
	r := New(Options{})
	var full atomic.Bool
	var opened atomic.Int32
	open := func() (Sink, error) {
		opened.Add(1)
		files, err := NewFiles(FilesOptions{Dir: dir})
		return fullDiskSink{files, &full}, err
	}
	if err := r.RunForever(open, 5*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if err := r.RunForever(open, time.Hour); !errors.Is(err, ErrBusy) {
		t.Errorf("a second one: %v", err)
	}
	made := func() int { all, _ := filepath.Glob(filepath.Join(dir, "*"+fileSuffix)); return len(all) }
	testwait.Until(t, "the first file", func() bool { return made() == 1 })
	full.Store(true)
	testwait.Until(t, "the recording ends", func() bool { // with its next frame
		r.RequestEnded("a", schedule.Outcome{Status: 200})
		return !r.Active()
	})
	tries := opened.Load()
	testwait.Until(t, "it is tried again while the disk is full", func() bool { return opened.Load() > tries+1 })
	full.Store(false)
	testwait.Until(t, "the next file", func() bool { return r.Active() && made() > 1 })
	r.RequestEnded("b", schedule.Outcome{Status: 200})
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	all, _ := filepath.Glob(filepath.Join(dir, "*"+fileSuffix))
	ended := 0
	for _, name := range all[1:] {
		in, err := Open(name)
		if err != nil {
			t.Fatal(err)
		}
		var e Entry
		for err = in.Next(&e); err == nil; err = in.Next(&e) {
			if e.Kind == Ended {
				ended++
			}
		}
		in.Close()
		if err != io.EOF {
			t.Errorf("%s: %v", name, err)
		}
	}
	if ended != 1 {
		t.Errorf("%d requests in the recording that was begun again, want 1", ended)
	}
	if _, err := r.Start(fullDiskSink{}); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := r.RunForever(open, time.Millisecond); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	tries = opened.Load()
	testwait.Holds(t, 100*time.Millisecond, "nothing is opened after Close but for an attempt in progress", func() bool { return opened.Load() <= tries+1 && !r.Active() })
}

// TestFilesOnFullDisk: a failed write leaves no partial frame, and a file without a frame is
// removed.
func TestFilesOnFullDisk(t *testing.T) {
	dir := t.TempDir()
	f, err := NewFiles(FilesOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.begin(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if all, _ := os.ReadDir(dir); len(all) != 0 || len(f.Names()) != 0 {
		t.Errorf("%d files are left, %d listed", len(all), len(f.Names()))
	}
	frame := []byte("not looked at here")
	if err := f.Frame(true, frame); err != nil {
		t.Fatal(err)
	}
	name := f.file.Name()
	f.file.Close() // makes every further write fail
	if f.file, err = os.Open(name); err != nil {
		t.Fatal(err)
	}
	if err := f.Frame(true, frame); err == nil {
		t.Error("a frame that could not be written was taken")
	}
	f.Close()
	if info, err := os.Stat(name); err != nil || info.Size() != headerSize+int64(len(frame)) {
		t.Errorf("the file has %v (%v), want its header and one frame", info, err)
	}
}
