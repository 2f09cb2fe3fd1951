package recording

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"
)

// Reader reads one file of a recording from its start. It is for one goroutine.
type Reader struct {
	path  string
	file  *os.File
	in    *bufio.Reader
	dec   *zstd.Decoder
	frame []byte
	plain []byte
	cur   entryReader
	ended bool
	first bool
}

// Open opens a file and checks its header.
func Open(path string) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("recording: cannot open the recording: %w", err)
	}
	r := &Reader{path: path, file: f, in: bufio.NewReaderSize(f, 1<<20), first: true}
	head := make([]byte, headerSize)
	n, err := io.ReadFull(r.in, head)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		f.Close()
		return nil, fmt.Errorf("recording: cannot read %q: %w", path, err)
	}
	if err := checkHeader(head[:n]); err != nil {
		f.Close()
		return nil, fmt.Errorf("recording: cannot read %q: %w", path, err)
	}
	if r.dec, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxUncompressed)); err != nil {
		f.Close()
		return nil, err
	}
	return r, nil
}

// Next reads the next entry into e. It returns io.EOF after the last entry of a complete file,
// else an error that names the file and wraps one of this package's errors.
func (r *Reader) Next(e *Entry) error {
	for len(r.cur.b) == 0 {
		if r.ended {
			return io.EOF
		}
		if err := r.nextFrame(); err != nil {
			return fmt.Errorf("recording: cannot read %q: %w", r.path, err)
		}
	}
	if err := r.cur.read(e); err != nil {
		return fmt.Errorf("recording: cannot read %q: %w", r.path, err)
	}
	return nil
}

func (r *Reader) nextFrame() (err error) {
	var kind frameKind
	if kind, r.frame, err = readFrame(r.in, r.frame); err == io.EOF {
		return ErrUnfinished
	} else if err != nil {
		return err
	}
	if r.first && kind != frameStart {
		return fmt.Errorf("%w: its first frame is not one with which a recording starts", ErrCorrupted)
	}
	r.first = false
	if kind == frameEnd {
		r.ended = true
		if _, err := r.in.ReadByte(); err != io.EOF {
			return fmt.Errorf("%w: there are bytes after its end", ErrCorrupted)
		}
		return nil
	}
	if r.plain, err = r.dec.DecodeAll(r.frame[frameHeadSize:], r.plain[:0]); err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupted, err)
	}
	r.cur = entryReader{b: r.plain}
	return nil
}

// Close closes the file.
func (r *Reader) Close() error {
	r.dec.Close()
	return r.file.Close()
}
