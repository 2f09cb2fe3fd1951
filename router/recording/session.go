package recording

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/objpool"
	"sluice/router/worker"
)

const (
	queueLength = 1 << 14
	frameBytes  = 1 << 20 // of entries, before compression
	// startInterval is the number of frames from one start frame to the next.
	startInterval   = 16
	flushInterval   = time.Second
	maxPools        = 1024
	maxPooledBuffer = 64 << 10
	stopTimeout     = 10 * time.Second
)

// session is one recording: a bounded queue and the goroutine that empties it.
type session struct {
	r           *Recorder
	sink        Sink
	info        Entry
	queue       chan item
	queuedBytes atomic.Int64 // bytes in the queue
	dropped     atomic.Uint64
	free        objpool.Pool[buffer]
	stop        chan struct{}
	once        sync.Once
	done        chan struct{}
	err         error // valid once done is closed

	// Used only by the session's goroutine.
	enc      *zstd.Encoder
	entries  []byte
	frame    []byte
	frames   int
	deferred []item // taken from the queue while initial blocks are written, in order
	pools    map[poolKey]uint64
	poolRef  [][]*worker.Rank // by number; keeps the slices alive, so that no other slice gets the address in poolKey
}

// item is one entry. pool contains the candidates of a choice, joined the rank of a RankAdded
// entry.
type item struct {
	b      *buffer
	pool   []*worker.Rank
	joined *worker.Rank
}

type buffer struct {
	b    []byte
	head int // where the pool's number is inserted into a choice
}

// poolKey identifies a slice of candidates, which nobody modifies after a choice has used it.
type poolKey struct {
	first *(*worker.Rank)
	n     int
}

func newSession(r *Recorder, sink Sink) *session {
	s := &session{r: r, sink: sink, queue: make(chan item, queueLength), stop: make(chan struct{}), done: make(chan struct{}),
		pools: make(map[poolKey]uint64), info: Entry{Kind: RecordingInfo, At: time.Now(), Recording: rand.Uint64() | 1}}
	s.free.New = func() *buffer { return new(buffer) }
	return s
}

func (s *session) hasSpace() *buffer {
	b := s.free.Get()
	b.b, b.head = b.b[:0], 0
	return b
}

// enqueue queues an entry, or drops it when the queue is full.
func (s *session) enqueue(it item) {
	n := int64(len(it.b.b))
	if s.queuedBytes.Add(n) <= s.r.opt.QueueBytes {
		select {
		case s.queue <- it:
			return
		default:
		}
	}
	s.queuedBytes.Add(-n)
	s.dropped.Add(1)
	s.r.dropped.Add(1)
	s.recycle(it.b)
}

func (s *session) recycle(b *buffer) {
	if cap(b.b) <= maxPooledBuffer {
		s.free.Put(b)
	}
}

func (s *session) run() {
	defer close(s.done)
	defer s.r.session.CompareAndSwap(s, nil)
	err := s.write()
	if closed := s.sink.Close(); err == nil {
		err = closed
	}
	if errors.Is(err, ErrReaderClosed) {
		s.r.opt.Log.Info("recording ended: its reader disconnected")
	} else if err != nil {
		s.r.opt.Log.Error("recording ended", "error", err)
	}
	s.err = err
}

func (s *session) write() (err error) {
	// One goroutine and the fastest level keep the cost for the router low.
	if s.enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(1<<20)); err != nil {
		return err
	}
	defer s.enc.Close()
	s.writeDefinitions()
	if err := s.writeContents(s.r.opt.Ranks()); err != nil {
		return err
	}
	if err := s.flush(); err != nil { // shows the client that asked for the recording that it has begun
		return err
	}
	tick := time.NewTicker(flushInterval)
	defer tick.Stop()
	for {
		for len(s.deferred) > 0 && err == nil {
			it := s.deferred[0]
			s.deferred = s.deferred[1:]
			err = s.writeItem(it)
		}
		if err != nil {
			return err
		}
		s.deferred = nil
		select {
		case it := <-s.queue:
			err = s.writeItem(it)
		case <-tick.C:
			err = s.flush()
		case <-s.stop:
			for {
				select {
				case it := <-s.queue:
					if err := s.writeItem(it); err != nil {
						return err
					}
				default:
					return s.flush()
				}
			}
		}
	}
}

// writeItem writes one item and, for a rank that joins, the blocks that it already holds.
func (s *session) writeItem(it item) error {
	s.appendEntry(it)
	if it.joined != nil {
		if err := s.writeContents([]*worker.Rank{it.joined}); err != nil {
			return err
		}
	}
	if len(s.entries) >= frameBytes {
		return s.flush()
	}
	return nil
}

// writeDefinitions writes all definitions to which entries refer, so that a file may begin
// here.
func (s *session) writeDefinitions() {
	now := time.Now()
	s.entries = s.info.Append(s.entries)
	e := Entry{Kind: Settings, At: now, Policy: s.r.opt.Policy, Weights: s.r.opt.Weights}
	s.entries = e.Append(s.entries)
	for _, rank := range s.r.opt.Ranks() {
		b := rankAddedEntry(s.hasSpace(), rank)
		s.entries = append(s.entries, b.b...)
		s.recycle(b)
	}
	for n, ranks := range s.poolRef {
		s.entries = poolEntry(s.entries, now, uint64(n), ranks)
	}
}

func (s *session) appendEntry(it item) {
	b := it.b
	s.queuedBytes.Add(-int64(len(b.b)))
	if b.head > 0 {
		n := s.pool(it.pool)
		s.entries = append(s.entries, b.b[:b.head]...)
		s.entries = binary.AppendUvarint(s.entries, n)
		s.entries = append(s.entries, b.b[b.head:]...)
	} else {
		s.entries = append(s.entries, b.b...)
	}
	s.r.entries.Add(1)
	s.recycle(b)
}

// pool returns the number of a pool and defines the number on first use.
func (s *session) pool(ranks []*worker.Rank) uint64 {
	var key poolKey
	if key.n = len(ranks); key.n > 0 {
		key.first = &ranks[0]
	}
	n, ok := s.pools[key]
	if !ok {
		if len(s.poolRef) >= maxPools {
			clear(s.pools)
			s.poolRef = s.poolRef[:0]
		}
		n = uint64(len(s.poolRef))
		s.pools[key], s.poolRef = n, append(s.poolRef, ranks)
		s.entries = poolEntry(s.entries, time.Now(), n, ranks)
	}
	return n
}

func (s *session) flush() error {
	if n := s.dropped.Swap(0); n > 0 {
		e := Entry{Kind: DroppedEntries, At: time.Now(), Count: n}
		s.entries = e.Append(s.entries)
	}
	if len(s.entries) == 0 {
		return nil
	}
	kind := frameData
	if s.frames%startInterval == 0 {
		kind = frameStart
	}
	s.frame = appendFrame(s.frame[:0], kind, s.enc, s.entries)
	s.frames++
	s.entries = s.entries[:0]
	if err := s.sink.Frame(kind == frameStart, s.frame); err != nil {
		return fmt.Errorf("recording: cannot write: %w", err)
	}
	s.r.bytes.Add(uint64(len(s.frame)))
	if s.frames%startInterval == 0 {
		s.writeDefinitions()
	}
	return nil
}

// close ends the recording and waits for it for at most stopTimeout, because a sink may hang.
func (s *session) close() error {
	s.once.Do(func() { close(s.stop) })
	select {
	case <-s.done:
		return s.err
	case <-time.After(stopTimeout):
		return fmt.Errorf("recording: the last frame was not written within %v", stopTimeout)
	}
}
