package coding

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/membudget"
)

// What Decode fails with, beside a body that is not what it says.
var (
	ErrTooLarge = errors.New("coding: the decoded body is over its bound")
	ErrBudget   = errors.New("coding: the memory for bodies is spent")
)

// inflation is by how much a decoded body is taken to be longer than the encoded
// one; where it is longer still the room grows, four times each time.
const inflation = 4

// Decode takes coding c (Gzip or Zstd) off src. What it gives lies in room, which
// it leases from budget and the caller must Release whatever the outcome; it is at
// most limit bytes long. Beside room a decoder keeps its window: 32 KiB of gzip's,
// at most 8 MiB of zstd's, of whose decoders there are as many as cores.
func (c Coding) Decode(src []byte, room *membudget.Lease, budget *membudget.Budget, limit int64) ([]byte, error) {
	first := min(max(inflation*int64(len(src)), membudget.Page), limit+1)
	lease, ok := membudget.Default.Lease(budget, int(first))
	if !ok {
		return nil, ErrBudget
	}
	*room = lease
	switch c {
	case Gzip:
		return gunzip(src, room, limit)
	case Zstd:
		return unzstd(src, room, limit)
	}
	return nil, fmt.Errorf("coding: cannot decode %v", c)
}

type gzipReader struct {
	gzip.Reader
	src bytes.Reader
}

// errBehind is that of bytes behind the end of a body's coding.
var errBehind = errors.New("there are bytes behind the end of its coding")

// next begins a member of src.
func (r *gzipReader) next() error {
	err := r.Reset(&r.src)
	r.Multistream(false)
	return err
}

// Read goes from one member to the next itself: gzip.Reader takes what stands behind the
// last for half a header.
func (r *gzipReader) Read(p []byte) (int, error) {
	for {
		n, err := r.Reader.Read(p)
		if err != io.EOF || r.src.Len() == 0 {
			return n, err
		}
		var magic [2]byte
		if _, _ = r.src.ReadAt(magic[:], r.src.Size()-int64(r.src.Len())); magic != [2]byte{0x1f, 0x8b} {
			return n, errBehind
		}
		if err := r.next(); err != nil || n > 0 {
			return n, err
		}
	}
}

var gzipReaders = sync.Pool{New: func() any { return new(gzipReader) }}

func gunzip(src []byte, room *membudget.Lease, limit int64) ([]byte, error) {
	r, _ := gzipReaders.Get().(*gzipReader)
	defer func() {
		r.src.Reset(nil)
		gzipReaders.Put(r)
	}()
	r.src.Reset(src)
	if err := r.next(); err != nil {
		return nil, broken(Gzip, err)
	}
	return readAll(Gzip, r, room, limit)
}

// maxWindow is the largest window that zstd may have as a content coding (RFC 9659).
const maxWindow = 8 << 20

// unzstds are the decoders, each of which may keep a window: as many as cores, for
// decoding waits for nothing but them.
var unzstds = sync.OnceValue(func() chan *zstd.Decoder {
	all := make(chan *zstd.Decoder, runtime.GOMAXPROCS(0))
	for range cap(all) {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecodeBuffersBelow(0))
		if err != nil {
			panic(err) // the options are constants
		}
		all <- d
	}
	return all
})

func unzstd(src []byte, room *membudget.Lease, limit int64) ([]byte, error) {
	all := unzstds()
	d := <-all
	defer func() {
		_ = d.Reset(nil)
		all <- d
	}()
	if err := d.Reset(bytes.NewReader(src)); err != nil {
		return nil, broken(Zstd, err)
	}
	return readAll(Zstd, d, room, limit)
}

// readAll reads r to its end into room.
func readAll(c Coding, r io.Reader, room *membudget.Lease, limit int64) ([]byte, error) {
	buf, n := room.Fill(), 0
	for {
		if n == len(buf) {
			// One byte over the bound tells an end from an excess.
			if int64(n) > limit {
				return nil, ErrTooLarge
			}
			if !room.Grow(int(min(4*int64(n), limit+1))) {
				return nil, ErrBudget
			}
			buf = room.Fill()
		}
		got, err := r.Read(buf[n:])
		n += got
		switch {
		case err == io.EOF && int64(n) > limit:
			return nil, ErrTooLarge
		case err == io.EOF:
			return buf[:n], nil
		case n > 0 && errors.Is(err, zstd.ErrMagicMismatch):
			return nil, broken(c, errBehind)
		case err != nil:
			return nil, broken(c, err)
		}
	}
}

func broken(c Coding, err error) error {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("the body ends inside its %v coding", c)
	case err == errBehind:
		return fmt.Errorf("there are bytes behind the end of the body's %v coding", c)
	}
	return fmt.Errorf("the body is no %v: %w", c, err)
}
