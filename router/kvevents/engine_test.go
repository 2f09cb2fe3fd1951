package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// engine publishes KV events over real sockets as vLLM and SGLang do. Its
// methods belong to the test's goroutine; replays are served by its own.
type engine struct {
	t        *testing.T
	ctx      *zmq.Context
	pub      *zmq.Socket // XPUB: a PUB that reports its subscribers
	Endpoint string
	Replay   string
	topic    string
	stopped  chan struct{}
	stop     chan struct{}

	mu           sync.Mutex
	next         uint64
	incarnation  int               // a process that has died answers nothing more
	stored       map[uint64][]byte // what replay can serve
	withTopic    bool              // vLLM from 0.26, SGLang from 0.5.22
	unresponsive bool              // takes requests and does not answer
	pause        time.Duration     // before each message of a replay
	dropOnce     map[uint64]bool   // messages lost on their way in the next replay
	requested    []uint64
}

func newEngine(t *testing.T, replay bool) *engine {
	t.Helper()
	e := &engine{t: t, stored: map[uint64][]byte{}, dropOnce: map[uint64]bool{}, stop: make(chan struct{}), stopped: make(chan struct{})}
	e.ctx = must(zmq.NewContext())
	e.openAnywhere(0)
	ready := make(chan string)
	if replay {
		go e.serveReplay(ready)
		e.Replay = <-ready
	} else {
		close(e.stopped)
	}
	t.Cleanup(func() {
		close(e.stop)
		<-e.stopped
		e.pub.Close()
		e.ctx.Term()
	})
	return e
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// openAnywhere binds the publishing socket to a port below the range that the
// system gives out by itself: tests give the port up and bind it again, and no
// other socket of this machine takes it in between.
func (e *engine) openAnywhere(hwm int) {
	e.t.Helper()
	e.newPub(hwm)
	testwait.Until(e.t, "bind a port", func() bool {
		return e.pub.Bind(fmt.Sprintf("tcp://127.0.0.1:%d", 20_000+rand.IntN(12_000))) == nil
	})
	e.Endpoint = must(e.pub.GetLastEndpoint())
}

// open binds the publishing socket to an endpoint.
func (e *engine) open(endpoint string) {
	e.t.Helper()
	e.newPub(0)
	testwait.Until(e.t, "bind "+endpoint, func() bool { return e.pub.Bind(endpoint) == nil })
}

// newPub makes the publishing socket. hwm is its high-water mark; 0 is none.
func (e *engine) newPub(hwm int) {
	e.pub = must(e.ctx.NewSocket(zmq.XPUB))
	e.pub.SetLinger(0)
	e.pub.SetXpubVerbose(1) // a second subscriber is reported while the first one is still leaving
	e.pub.SetSndhwm(hwm)
}

// closePublisher closes the publishing socket and waits until nobody listens at its
// endpoint: ZMQ's Close only asks for that, and a thread of its own does it.
func (e *engine) closePublisher() {
	e.t.Helper()
	e.pub.Close()
	testwait.Until(e.t, "nobody listens at "+e.Endpoint, func() bool {
		c, err := net.Dial("tcp", strings.TrimPrefix(e.Endpoint, "tcp://"))
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
}

// reopen breaks all connections and listens again at the same address.
func (e *engine) reopen(between func()) {
	e.closePublisher()
	between()
	e.open(e.Endpoint)
}

// subscribed waits for a new subscription, so that what is published from then
// on is not lost.
func (e *engine) subscribed() {
	e.t.Helper()
	e.pub.SetRcvtimeo(20 * time.Second)
	for {
		frames, err := e.pub.RecvMessageBytes(0)
		if err != nil {
			e.t.Fatalf("nobody subscribed: %v", err)
		}
		if frames[0][0] == 1 {
			return
		}
	}
}

// store takes a number for a batch and lets replay serve it, but sends nothing.
func (e *engine) store(payload []byte) uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	seq := e.next
	e.next++
	e.stored[seq] = payload
	return seq
}

func (e *engine) publish(payload []byte) { e.send(e.store(payload), payload) }

func (e *engine) send(seq uint64, payload []byte) {
	e.frames([]byte(e.topic), binary.BigEndian.AppendUint64(nil, seq), payload)
}

func (e *engine) frames(frames ...[]byte) {
	if _, err := e.pub.SendMessage(frames); err != nil {
		e.t.Fatalf("cannot publish: %v", err)
	}
}

// restart begins at 0 with nothing kept, as a restarted process does.
func (e *engine) restart() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.incarnation++
	e.next, e.stored = 0, map[uint64][]byte{}
}

func (e *engine) set(change func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change()
}

func (e *engine) serveReplay(ready chan<- string) {
	defer close(e.stopped)
	router := must(e.ctx.NewSocket(zmq.ROUTER))
	defer router.Close()
	router.SetLinger(0)
	router.SetSndhwm(0)
	router.SetRcvtimeo(20 * time.Millisecond)
	if err := router.Bind("tcp://127.0.0.1:*"); err != nil {
		panic(err)
	}
	ready <- must(router.GetLastEndpoint())
	for {
		select {
		case <-e.stop:
			return
		default:
		}
		frames, err := router.RecvMessageBytes(0)
		if err != nil || len(frames) != 3 || len(frames[1]) != 0 || len(frames[2]) != 8 {
			continue // as the engines do with what is not exactly a request
		}
		e.answer(router, frames[0], binary.BigEndian.Uint64(frames[2]))
	}
}

func (e *engine) answer(router *zmq.Socket, client []byte, from uint64) {
	e.mu.Lock()
	e.requested = append(e.requested, from)
	deaf, to, incarnation := e.unresponsive, e.next, e.incarnation
	e.mu.Unlock()
	if deaf {
		return
	}
	reply := func(topic, seq, payload []byte) {
		if e.withTopic {
			router.SendMessage(client, "", topic, seq, payload)
		} else {
			router.SendMessage(client, "", seq, payload)
		}
	}
	sent := false
	for seq := from; seq < to; seq++ {
		e.mu.Lock()
		if e.incarnation != incarnation { // half of the old life's and half of the new one's is what no engine sends
			e.mu.Unlock()
			return
		}
		payload, ok := e.stored[seq]
		drop, pause := e.dropOnce[seq], e.pause
		if drop && sent {
			e.dropOnce[seq] = false
		}
		e.mu.Unlock()
		if !ok || drop && sent { // an empty socket has room for the first
			continue
		}
		sent = true
		select {
		case <-e.stop:
			return
		case <-time.After(pause):
		}
		reply([]byte(e.topic), binary.BigEndian.AppendUint64(nil, seq), payload)
	}
	e.mu.Lock()
	died := e.incarnation != incarnation
	e.mu.Unlock()
	if died {
		return
	}
	reply(nil, []byte{255, 255, 255, 255, 255, 255, 255, 255}, nil)
}

// eventWriter writes what an engine's cache goes through: prompts that grow, lose
// their tails, share nothing. Its engine hashes are of one life.
type eventWriter struct {
	rng         *rand.Rand
	incarnation uint64
	prompts     [][]uint32 // tokens stored so far
}

const writerBlock = 4

func newEventWriter(seed, incarnation uint64) *eventWriter {
	return &eventWriter{rng: rand.New(rand.NewPCG(seed, incarnation)), incarnation: incarnation, prompts: make([][]uint32, 6)}
}

func (s *eventWriter) hash(prompt, block int) any {
	return s.incarnation<<40 | uint64(prompt)<<20 | uint64(block) | 1<<63
}

// batch is one message of one to three events.
func (s *eventWriter) batch() []byte {
	var events [][]byte
	for range 1 + s.rng.IntN(3) {
		p := s.rng.IntN(len(s.prompts))
		have := len(s.prompts[p]) / writerBlock
		if have > 0 && s.rng.IntN(8) == 0 {
			e := wireEvent{kind: "BlockRemoved", medium: "GPU"}
			for have > 0 {
				have--
				e.hashes = append(e.hashes, s.hash(p, have))
			}
			s.prompts[p] = nil // begins again, so that some chains start late
			events = append(events, e.asArray())
			continue
		}
		if have > 0 && s.rng.IntN(4) == 0 {
			e := wireEvent{kind: "BlockRemoved", hashes: []any{s.hash(p, have-1)}, medium: "GPU"}
			s.prompts[p] = s.prompts[p][:writerBlock*(have-1)]
			events = append(events, e.asMap())
			continue
		}
		e := wireEvent{blockSize: writerBlock, medium: "GPU"}
		if have > 0 {
			e.parent = s.hash(p, have-1)
		}
		for b := range 1 + s.rng.IntN(3) {
			e.hashes = append(e.hashes, s.hash(p, have+b))
			for i := range writerBlock {
				token := p<<16 | (have+b)<<4 | i
				e.tokens = append(e.tokens, token)
				s.prompts[p] = append(s.prompts[p], uint32(token))
			}
		}
		if s.rng.IntN(2) == 0 {
			events = append(events, e.asArray())
		} else {
			events = append(events, e.asMap())
		}
	}
	return wireBatch(nil, events...)
}

// the longest prompts any scribe may have written, to look for.
func allPrompts() (out [][]blockhash.Seq) {
	for p := range 6 {
		var tokens []uint32
		for b := range 400 {
			for i := range writerBlock {
				tokens = append(tokens, uint32(p<<16|b<<4|i))
			}
		}
		out = append(out, blockhash.Seqs(nil, blockhash.NewSalt("m", "", ""), tokens, writerBlock))
	}
	return out
}

// counterMap is an Observer that adds up.
type counterMap struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counterMap) AddFeedCount(_ worker.ID, counter string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[counter] += n
}

func (c *counterMap) get(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[name]
}

// feedHarness is a feed under test.
type feedHarness struct {
	t     *testing.T
	feeds *Feeds
	index kvindex.Index
	rank  *worker.Rank
	src   Source
	counterMap
}

func newFeedHarness(t *testing.T, e *engine, change func(*Options)) *feedHarness {
	t.Helper()
	r := &feedHarness{t: t, index: kvindex.New(kvindex.Options{})}
	w := worker.New(worker.Spec{ID: "w", URL: "http://127.0.0.1:1", Ranks: []uint16{0, 1}})
	r.rank = w.Ranks[0]
	r.rank.Slot = 70
	opt := Options{Index: r.index, Counters: r, ReplayTimeout: 10 * time.Second, RetryMin: 10 * time.Millisecond, RetryMax: 50 * time.Millisecond}
	if change != nil {
		change(&opt)
	}
	r.feeds = NewFeeds(opt)
	t.Cleanup(r.feeds.Close)
	r.src = Source{Rank: r.rank, Model: "m", Engine: "vllm", Endpoint: e.Endpoint, ReplayEndpoint: e.Replay}
	return r
}

func (r *feedHarness) start() {
	r.t.Helper()
	if err := r.feeds.Start(r.src); err != nil {
		r.t.Fatal(err)
	}
}

func (r *feedHarness) state() worker.FeedState { return worker.FeedState(r.rank.Feed.Load()) }

func (r *feedHarness) awaitState(s worker.FeedState) {
	r.t.Helper()
	testwait.Until(r.t, fmt.Sprintf("state %v", s), func() bool { return r.state() == s })
}

// awaitOpen waits until the feed has come as far as it can before a message comes.
func (r *feedHarness) awaitOpen() {
	r.t.Helper()
	want := worker.FeedLive
	if r.src.ReplayEndpoint == "" {
		want = worker.FeedSilent
	}
	r.awaitState(want)
}

func (r *feedHarness) await(counter string, n int) {
	r.t.Helper()
	testwait.Until(r.t, fmt.Sprintf("%d %s", n, counter), func() bool { return r.get(counter) >= n })
}

// oracle is what an index holds after these payloads and no accident.
func (r *feedHarness) oracle(payloads ...[]byte) *kvindex.Naive {
	model := kvindex.NewNaive()
	rank := &worker.Rank{ID: r.rank.ID, Slot: r.rank.Slot}
	f := &feed{source: Source{Rank: rank, Model: "m"}, options: &Options{MaxFrame: 1 << 30},
		Applier: NewApplier(model, rank, "m", ""), log: slog.New(slog.DiscardHandler)}
	for i, p := range payloads {
		f.apply(uint64(i), p)
	}
	return model
}

// indexEquals checks that the index has exactly what the payloads leave behind, when
// the feed has come to rest.
func (r *feedHarness) indexEquals(payloads ...[]byte) {
	r.t.Helper()
	model := r.oracle(payloads...)
	if len(payloads) >= 5 && model.Len() == 0 {
		r.t.Fatal("the oracle holds nothing: this test shows nothing")
	}
	want := r.describe(model)
	var got string
	if !testwait.Poll(20*time.Second, func() bool { got = r.describe(r.index); return got == want }) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.t.Fatalf("the index differs from the oracle\n got %s\nwant %s\ncounted %v", got, want, r.n)
	}
	testwait.Until(r.t, "the rank's count of blocks", func() bool { return int(r.rank.CachedBlocks.Load()) == model.CachedBlocks(r.rank.Slot) })
}

func (r *feedHarness) describe(ix kvindex.Index) string {
	out := fmt.Sprintf("held=%d depths", ix.CachedBlocks(r.rank.Slot))
	var o kvindex.Overlap
	for _, seqs := range allPrompts() {
		ix.Find(seqs, &o)
		out += fmt.Sprintf(" %d", o.Depth(r.rank.Slot))
	}
	return out
}
