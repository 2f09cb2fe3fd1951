package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"sluice/router/worker"
)

// File is a file of workers, read again when it changes. It is polled rather
// than watched: that holds for editors that rename, for a ConfigMap's links and
// for network file systems alike, and costs one small read a second.
type File struct {
	Path string
	// Parse makes workers of the file's text. Its error names line and column;
	// workers of a file with an error are not looked at.
	Parse func(text []byte) ([]worker.Spec, error)
	// Every is the time between two looks [1s].
	Interval time.Duration
	// Now brings a text that somebody has just read of the file; nil: nobody does.
	Reloads <-chan Text
}

// Text is what stands in a file now, to be looked at even where it has not changed.
type Text struct {
	Bytes []byte
	// Done, of room for one, is told how it went.
	Done chan<- error
}

// maxFile bounds what is read of a file.
const maxFile = 1 << 20

// Name implements Source.
func (f *File) Name() string { return "file " + f.Path }

// Run reads the file whenever its text changes. Text that does not parse, a file
// that is gone or cannot be read leave the workers as they are.
func (f *File) Run(ctx context.Context, set *Set) error {
	every := f.Interval
	if every <= 0 {
		every = time.Second
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	var last []byte
	broken := true // read whatever stands there, the first time
	take := func(text []byte) error {
		last, broken = text, false
		specs, err := f.Parse(text)
		if err != nil {
			set.Failed(err)
			return err
		}
		set.Replace(specs)
		return nil
	}
	for {
		text, err := f.readStable(ctx, last)
		switch {
		case err != nil:
			set.Failed(fmt.Errorf("discovery: cannot read %q: %w", f.Path, err))
			broken = true
		case broken || !bytes.Equal(text, last):
			_ = take(text) // Failed was told
		}
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				waiting = false
			case now := <-f.Reloads:
				now.Done <- take(now.Bytes)
			}
		}
	}
}

// readStable reads the file until its text stays the same for a moment: an editor
// that writes in place must not be read half way.
func (f *File) readStable(ctx context.Context, last []byte) ([]byte, error) {
	text, err := ReadFile(f.Path)
	for range 20 {
		if err != nil || bytes.Equal(text, last) {
			return text, err
		}
		select {
		case <-ctx.Done():
			return last, nil
		case <-time.After(stableTime):
		}
		before := text
		if text, err = ReadFile(f.Path); err == nil && bytes.Equal(text, before) {
			return text, nil
		}
	}
	return text, err
}

// stableTime is long for an editor's last writes, and short for a person.
const stableTime = 50 * time.Millisecond

// ReadFile reads a file as File does: a regular one, of a megabyte at most.
func ReadFile(path string) ([]byte, error) {
	// Looked at before it is opened: to open a pipe would wait for a writer.
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, errors.New("it is no regular file")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("it has more than %d bytes", maxFile)
	}
	return text, err
}
