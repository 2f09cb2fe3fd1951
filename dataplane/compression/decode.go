package compression

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"runtime"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/membudget"
	"sluice/dataplane/objpool"
)

// Errors of Decode, other than those for a malformed body.
var (
	ErrTooLarge = errors.New("compression: the decoded body exceeds its limit")
	ErrBudget   = errors.New("compression: the memory budget for bodies is exhausted")
)

// expectedRatio is the assumed ratio of decoded to encoded length. If a body is longer, its
// buffer grows four times at each step.
const expectedRatio = 4

// Decode decodes src, whose coding is c (Gzip or Zstd), to at most limit bytes. The result is
// in buf, which Decode leases from budget and the caller must Release, also after an error.
// During decoding budget counts the decoder's memory too: 64 KiB for gzip, and for zstd its
// window of at most 8 MiB with about 448 KiB beside it. Decode fails with ErrTooLarge,
// ErrBudget, ErrBusy if its turn does not come in time (see scheduler), or an error about a
// malformed body that is meant for the client.
func (c Algorithm) Decode(src []byte, buf *membudget.Lease, budget *membudget.Budget, limit int64) ([]byte, error) {
	first := min(max(expectedRatio*int64(len(src)), membudget.Page), max(limit, 1))
	lease, ok := membudget.Default.Lease(budget, int(min(first, largeOutput)))
	if !ok {
		return nil, ErrBudget
	}
	*buf = lease
	own, err := decoding.acquire()
	if err != nil {
		return nil, err
	}
	defer own.release()
	o := decodeOutput{lease: buf, initialSize: first, limit: limit, slot: &own, budget: budget}
	switch c {
	case Gzip:
		return o.gunzip(src, budget)
	case Zstd:
		return o.unzstd(src, budget)
	}
	return nil, fmt.Errorf("compression: cannot decode %v; want gzip or zstd", c)
}

// decodeOutput is where a body is decoded to.
type decodeOutput struct {
	lease       *membudget.Lease
	initialSize int64 // the expected decoded length
	limit       int64
	slot        *slot
	budget      *membudget.Budget
}

type gzipReader struct {
	gzip.Reader
	src bytes.Reader
}

// errTrailingData is the error for bytes after the end of the encoded data.
var errTrailingData = errors.New("data after the end")

// next starts the next gzip member of src.
func (r *gzipReader) next() error {
	err := r.Reset(&r.src)
	r.Multistream(false)
	return err
}

// Read goes from one member to the next itself, because gzip.Reader would report bytes after
// the last member as an incomplete header.
func (r *gzipReader) Read(p []byte) (int, error) {
	for {
		n, err := r.Reader.Read(p)
		if err != io.EOF || r.src.Len() == 0 {
			return n, err
		}
		var magic [2]byte
		if _, _ = r.src.ReadAt(magic[:], r.src.Size()-int64(r.src.Len())); magic != [2]byte{0x1f, 0x8b} {
			return n, errTrailingData
		}
		if err := r.next(); err != nil || n > 0 {
			return n, err
		}
	}
}

var gzipReaders = objpool.Pool[gzipReader]{New: func() *gzipReader { return new(gzipReader) }}

// gzipMemory is the approximate memory of a gzip decoder: its window and tables.
const gzipMemory = 64 << 10

func (o *decodeOutput) gunzip(src []byte, budget *membudget.Budget) ([]byte, error) {
	if !budget.Acquire(gzipMemory) {
		return nil, ErrBudget
	}
	defer budget.Release(gzipMemory)
	r := gzipReaders.Get()
	defer func() {
		r.src.Reset(nil)
		gzipReaders.Put(r)
	}()
	r.src.Reset(src)
	if err := r.next(); err != nil {
		return nil, malformed(Gzip, err)
	}
	return o.readAll(Gzip, r)
}

// The windows of zstd decoders are powers of two from minWindow to maxWindow, the largest
// that RFC 9659 allows in the content coding zstd. windowOverhead is the approximate memory
// of a decoder in addition to its window.
const (
	minWindow      = 128 << 10
	maxWindow      = 8 << 20
	windowOverhead = 448 << 10
)

// decoderPools have the idle zstd decoders, by the binary logarithm of window/minWindow.
// Decoders with larger windows are not pooled.
var decoderPools [5]chan *zstd.Decoder

func init() {
	for i := range decoderPools {
		decoderPools[i] = make(chan *zstd.Decoder, min(runtime.GOMAXPROCS(0), 2))
	}
}

// decoderPool returns the pool for a window. It is nil for windows that are not pooled; a nil
// channel neither provides nor accepts decoders.
func decoderPool(window uint64) chan *zstd.Decoder {
	if at := bits.Len64(window / minWindow); at <= len(decoderPools) {
		return decoderPools[at-1]
	}
	return nil
}

func acquireDecoder(window uint64) *zstd.Decoder {
	select {
	case d := <-decoderPool(window):
		return d
	default:
	}
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(window), zstd.WithDecodeBuffersBelow(0))
	if err != nil {
		panic(err) // the options are constants
	}
	return d
}

func releaseDecoder(d *zstd.Decoder, window uint64) {
	if d.Reset(nil) == nil {
		select {
		case decoderPool(window) <- d:
			return
		default:
		}
	}
	d.Close()
}

// windowOf returns the smallest decoder window that fits the first frame of src.
func windowOf(src []byte) uint64 {
	var head zstd.Header
	if head.Decode(src) != nil {
		return minWindow // the decoder reports the error
	}
	window := head.WindowSize
	if head.SingleSegment {
		window = head.FrameContentSize
	}
	switch {
	case window <= minWindow:
		return minWindow
	case window >= maxWindow:
		return maxWindow // or more, which the decoder refuses
	}
	return 1 << bits.Len64(window-1)
}

func (o *decodeOutput) unzstd(src []byte, budget *membudget.Budget) ([]byte, error) {
	window := windowOf(src)
	b, err := o.unzstdWithin(window, src, budget)
	if window < maxWindow && windowExceeded(err) { // by a later frame
		b, err = o.unzstdWithin(maxWindow, src, budget)
	}
	if windowExceeded(err) {
		return nil, fmt.Errorf("the zstd body needs a window of more than %d MiB, which RFC 9659 does not allow; compress it as a stream", maxWindow>>20)
	}
	return b, err
}

// windowExceeded reports whether a frame needs a larger window. For a single-segment frame,
// whose window is its content, the decoder reports that the content is too large.
func windowExceeded(err error) bool {
	return errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded)
}

// unzstdWithin decodes frames with windows of up to window bytes.
func (o *decodeOutput) unzstdWithin(window uint64, src []byte, budget *membudget.Budget) ([]byte, error) {
	acquired := budget.Count()
	defer acquired.Release()
	need := int(window) + windowOverhead
	if err := o.acquireMemory(need, func() bool { return acquired.Acquire(need) }); err != nil {
		return nil, err
	}
	d := acquireDecoder(window)
	defer releaseDecoder(d, window)
	if err := d.Reset(bytes.NewReader(src)); err != nil {
		return nil, malformed(Zstd, err)
	}
	return o.readAll(Zstd, d)
}

// acquireMemory calls memory to acquire n bytes. If n is large it waits for a large turn.
func (o *decodeOutput) acquireMemory(n int, memory func() bool) error {
	if n > largeOutput && int64(n) <= o.budget.Limit() {
		return o.slot.acquireLarge(memory)
	}
	if !memory() {
		return ErrBudget
	}
	return nil
}

// readAll reads r to its end into the leased buffer, which grows with the data.
func (o *decodeOutput) readAll(c Algorithm, r io.Reader) ([]byte, error) {
	buf, n := o.lease.Fill(), 0
	var beyond [1]byte
	for {
		into := buf[n:min(len(buf), n+timeSlice)]
		if int64(n) >= o.limit {
			into = beyond[:] // one byte over the limit distinguishes the end from excess
		} else if len(into) == 0 {
			want := int(min(max(4*int64(n), o.initialSize), o.limit))
			if err := o.acquireMemory(want, func() bool { return o.lease.Grow(want) }); err != nil {
				return nil, err
			}
			buf = o.lease.Fill()
			continue
		}
		got, err := r.Read(into)
		if n += got; int64(n) > o.limit {
			return nil, ErrTooLarge
		}
		switch {
		case err == io.EOF:
			return buf[:n], nil
		case n > 0 && errors.Is(err, zstd.ErrMagicMismatch):
			return nil, malformed(c, errTrailingData)
		case err != nil:
			return nil, malformed(c, err)
		}
		if err := o.slot.addDecoded(got); err != nil {
			return nil, err
		}
	}
}

func malformed(c Algorithm, err error) error {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("the %v body is truncated", c)
	case err == errTrailingData:
		return fmt.Errorf("the %v body has data after its end", c)
	}
	return fmt.Errorf("the body is not valid %v: %w", c, err)
}
