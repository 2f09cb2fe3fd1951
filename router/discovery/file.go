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

// File is a source that reads workers from a file and reads it again when it changes. It polls the
// file instead of watching it: polling also works with editors that rename, with a ConfigMap's
// symbolic links and with network file systems, and costs one small read a second.
type File struct {
	Path string
	// Parse returns the workers in the file's text. Its errors name line and column. If Parse
	// fails, the workers stay as they are.
	Parse func(text []byte) ([]worker.Spec, error)
	// Interval is the time between two reads [1s].
	Interval time.Duration
	// Reloads receives text that a reload of the configuration has just read from the file; nil:
	// none.
	Reloads <-chan Text
}

// Text is the content of a file. File applies it even if it has not changed.
type Text struct {
	Bytes []byte
	// Done receives the result of applying the text. It must have a buffer of one.
	Done chan<- error
}

// maxFile bounds the size of a file.
const maxFile = 1 << 20

// Name implements Source.
func (f *File) Name() string { return "file " + f.Path }

// Run applies the file whenever its text changes. If the file is missing, cannot be read or does
// not parse, the workers stay as they are.
func (f *File) Run(ctx context.Context, set *Set) error {
	every := f.Interval
	if every <= 0 {
		every = time.Second
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	var last []byte
	broken := true // apply the first text in any case
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
			_ = take(text) // take has already reported the error to set
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

// readStable reads the file until two reads, stableTime apart, agree: an editor may be writing it
// in place.
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

// stableTime is long compared with an editor's writes, and too short for a user to notice.
const stableTime = 50 * time.Millisecond

// ReadFile reads a file as File does. It fails unless the file is a regular file of at most 1 MiB.
func ReadFile(path string) ([]byte, error) {
	// Stat comes before Open, because opening a pipe would wait for a writer.
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file")
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
