package compression

import (
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/objpool"
)

// Level and window are those of the fastest encoders: an answer is small, and its
// way is short compared with the time its making took.
const (
	gzipLevel  = gzip.BestSpeed
	zstdWindow = 128 << 10
)

type gzipWriter struct {
	*gzip.Writer
	to appender
}

// appender is an io.Writer that appends.
type appender struct{ b []byte }

func (a *appender) Write(p []byte) (int, error) {
	a.b = append(a.b, p...)
	return len(p), nil
}

var gzipWriters = objpool.Pool[gzipWriter]{New: func() *gzipWriter {
	w, err := gzip.NewWriterLevel(io.Discard, gzipLevel)
	if err != nil {
		panic(err) // the level is a constant
	}
	return &gzipWriter{Writer: w}
}}

var zstdEncoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(zstdWindow), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic(err) // the options are constants
	}
	return e
})

// Append appends src in coding c to dst; for Identity, src as it is.
func (c Algorithm) Append(dst, src []byte) []byte {
	switch c {
	case Gzip:
		w := gzipWriters.Get()
		w.to.b = dst
		w.Reset(&w.to)
		_, _ = w.Write(src) // an appender does not fail
		_ = w.Close()
		dst, w.to.b = w.to.b, nil
		gzipWriters.Put(w)
		return dst
	case Zstd:
		return zstdEncoder().EncodeAll(src, dst)
	}
	return append(dst, src...)
}

// Stream puts a coding on a body that comes in pieces, each of which can be
// decoded at once by who has all before it. It is for one goroutine; Close gives
// its encoder back.
type Stream struct {
	gzip *gzipWriter
	zstd *zstd.Encoder
	to   appender
}

var zstdStreams = sync.Pool{New: func() any {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(zstdWindow),
		zstd.WithLowerEncoderMem(true), zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err) // the options are constants
	}
	return e
}}

// NewStream makes a Stream of c, which is Gzip or Zstd.
func (c Algorithm) NewStream() (*Stream, error) {
	s := new(Stream)
	switch c {
	case Gzip:
		s.gzip = gzipWriters.Get()
		s.gzip.Reset(&s.to)
	case Zstd:
		s.zstd, _ = zstdStreams.Get().(*zstd.Encoder)
		s.zstd.Reset(&s.to)
	default:
		return nil, fmt.Errorf("coding: cannot encode a stream in %v", c)
	}
	return s, nil
}

// Append appends the coding of src and all that was held back to dst.
func (s *Stream) Append(dst, src []byte) ([]byte, error) {
	s.to.b = dst
	var err error
	if s.gzip != nil {
		if _, err = s.gzip.Write(src); err == nil {
			err = s.gzip.Flush()
		}
	} else if _, err = s.zstd.Write(src); err == nil {
		err = s.zstd.Flush()
	}
	dst, s.to.b = s.to.b, nil
	return dst, err
}

// Close appends the end of the coded body to dst. Called once, also for a stream
// that broke, whose end nobody is sent.
func (s *Stream) Close(dst []byte) ([]byte, error) {
	s.to.b = dst
	var err error
	if s.gzip != nil {
		err = s.gzip.Close()
		s.gzip.Reset(io.Discard)
		gzipWriters.Put(s.gzip)
	} else {
		err = s.zstd.Close()
		s.zstd.Reset(nil)
		zstdStreams.Put(s.zstd)
	}
	dst, s.to.b = s.to.b, nil
	s.gzip, s.zstd = nil, nil
	return dst, err
}
