package compression

import (
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/objpool"
)

// The level and window are those of the fastest encoders: a response is small, and its
// transfer is short compared with its generation.
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

// Append appends src, encoded with c, to dst and returns the result. Identity appends src
// unchanged.
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

// Stream encodes a body piece by piece. A client can decode each piece on arrival. A Stream
// belongs to one goroutine, and Close must be called to return its encoder to the pool.
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

// NewStream returns a Stream for c. It fails unless c is Gzip or Zstd.
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
		return nil, fmt.Errorf("compression: cannot encode a stream as %v; want gzip or zstd", c)
	}
	return s, nil
}

// Append encodes src, flushes the encoder and appends all of its output to dst.
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

// Close appends the end of the encoded body to dst. It must be called exactly once, also for
// a broken stream whose end no client receives.
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
