package kvevents

import (
	"bytes"
	"encoding/binary"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// waitSettled publishes one more batch and waits for it, so that all before it has
// been handled.
func waitSettled(r *feedHarness, e *engine) {
	r.t.Helper()
	before := r.get("cleared")
	e.publish(wireBatch(nil, wireEvent{kind: "AllBlocksCleared"}.asArray()))
	r.await("cleared", before+1)
}

func newLiveHarness(t *testing.T, change func(*Options)) (*feedHarness, *engine) {
	t.Helper()
	e := newEngine(t, false)
	r := newFeedHarness(t, e, change)
	r.start()
	e.subscribed()
	r.awaitOpen()
	return r, e
}

func TestMalformedMessages(t *testing.T) {
	r, e := newLiveHarness(t, nil)
	all := batches(newEventWriter(30, 1), 5)
	for _, b := range all {
		e.publish(b)
	}
	number := binary.BigEndian.AppendUint64(nil, 5)
	e.frames(nil)
	e.frames(nil, number)
	e.frames(nil, number, all[0], all[0])
	e.frames(nil, number[:7], all[0])
	r.await("malformed", 4)
	r.indexEquals(all...)
	if r.get("resets") != 0 {
		t.Errorf("counted %v", r.n)
	}
}

func TestUnreadableBatches(t *testing.T) {
	bad := map[string]struct {
		payload []byte
		trusted bool // the held blocks may still be trusted
	}{
		"empty":         {nil, false},
		"no msgpack":    {[]byte("HTTP/1.1 400 Bad Request"), false},
		"cut":           {newEventWriter(31, 1).batch()[:20], false},
		"a bad removal": {wireBatch(nil, pack(nil, []any{"BlockRemoved", []any{"x"}})), false},
		"a bad event":   {wireBatch(nil, []byte{5}), false},
		"a bad store":   {wireBatch(nil, pack(nil, []any{"BlockStored", []any{"x"}, nil, []any{1}, 1, nil})), true},
	}
	for name, c := range bad {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			r, e := newLiveHarness(t, nil)
			s := newEventWriter(32, 1)
			all := batches(s, 10)
			for _, b := range all {
				e.publish(b)
			}
			e.publish(c.payload)
			r.await("malformed", 1)
			if c.trusted {
				r.indexEquals(all...)
			} else {
				r.indexEquals()
			}
			more := batches(newEventWriter(33, 2), 5)
			for _, b := range more {
				e.publish(b)
			}
			if c.trusted {
				more = append(all, more...)
			}
			r.indexEquals(more...)
			if r.get("malformed") != 1 || r.get("gaps") != 0 || r.state() != worker.FeedLive {
				t.Errorf("state %v, counted %v", r.state(), r.n)
			}
		})
	}
}

// A store that cannot be read is a block missed. All that the engine keeps is not asked
// for because of it: what is held may be older than that.
func TestBadStoreIsIsolated(t *testing.T) {
	e := newEngine(t, true)
	all := batches(newEventWriter(44, 1), 30)
	for _, b := range all {
		e.store(b)
	}
	r := newFeedHarness(t, e, func(o *Options) { o.TailCheck = 100 * time.Millisecond })
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedLive)
	r.indexEquals(all...)
	e.set(func() {
		for seq := range uint64(25) {
			delete(e.stored, seq)
		}
	})
	checks := r.get("tail_checks")
	e.publish(wireBatch(nil, pack(nil, []any{"BlockStored", []any{"x"}, nil, []any{1}, 1, nil})))
	r.await("malformed", 1)
	r.await("tail_checks", checks+1)
	r.indexEquals(all...)
	if r.get("resyncs") != 0 || r.get("resets") != 0 {
		t.Errorf("counted %v", r.n)
	}
}

func TestReplayOfGarbage(t *testing.T) {
	e := newEngine(t, true)
	all := batches(newEventWriter(34, 1), 60)
	for i, b := range all {
		if i == 20 {
			b = []byte("garbage")
		}
		e.store(b)
	}
	r := newFeedHarness(t, e, nil)
	r.start()
	r.awaitOpen()
	r.await("malformed", 1)
	r.indexEquals(all[21:]...)
	// Each replay by the engine contains the message again.
	if n := r.get("malformed"); n > 1+maxResyncs {
		t.Errorf("%d messages that could not be read; want %d at most", n, 1+maxResyncs)
	}
}

func TestOversize(t *testing.T) {
	r, e := newLiveHarness(t, func(o *Options) { o.MaxFrame = 1 << 16 })
	all := batches(newEventWriter(35, 1), 5)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
	e.publish(make([]byte, 1<<16+1))
	r.await("oversize", 1)
	r.indexEquals()
}

// Far over the limit ZMQ itself cuts the connection, before it takes the memory.
func TestFarOversize(t *testing.T) {
	r, e := newLiveHarness(t, func(o *Options) { o.MaxFrame = 1 << 16 })
	all := batches(newEventWriter(41, 1), 10)
	for _, b := range all[:5] {
		e.publish(b)
	}
	r.indexEquals(all[:5]...)
	e.publish(make([]byte, 1<<18))
	e.subscribed() // again
	r.await("resets", 1)
	r.indexEquals()
	later := batches(newEventWriter(42, 2), 10)
	for _, b := range later {
		e.publish(b)
	}
	r.indexEquals(later...)
	r.awaitState(worker.FeedLive)
}

func TestRanks(t *testing.T) {
	r, e := newLiveHarness(t, nil)
	stored := func(rank any, hash int) []byte {
		return wireBatch(rank, wireEvent{hashes: []any{hash}, tokens: []any{hash}, blockSize: 1}.asMap())
	}
	e.publish(stored(1, 1))
	e.publish(stored(0, 2))
	e.publish(stored(nil, 3))
	r.await("stored", 2)
	if r.get("wrong_rank") != 1 || r.get("stored") != 2 || r.get("gaps") != 0 {
		t.Errorf("counted %v", r.n)
	}
	one := worker.New(worker.Spec{ID: "one"}).Ranks[0]
	if f := NewApplier(nil, one, "m", ""); !f.isOwnRank(3) {
		t.Error("the only rank of a worker of whose ranks nothing was said refuses its own batches")
	}
	if f := NewApplier(nil, r.rank, "m", ""); f.isOwnRank(1) || !f.isOwnRank(0) {
		t.Error("rank 0 of two takes the other's batches, or not its own")
	}
}

func TestUnindexedEvents(t *testing.T) {
	r, e := newLiveHarness(t, nil)
	plain := wireEvent{hashes: []any{1}, tokens: []any{1, 2, 3, 4}, blockSize: 4}
	with := func(change func(e *wireEvent)) []byte { e := plain; change(&e); return e.asMap() }
	ignored := [][]byte{
		with(func(e *wireEvent) { e.more = map[string]any{"group_idx": 1} }),
		with(func(e *wireEvent) { e.medium = "TAPE" }),
		with(func(e *wireEvent) { e.tokens = e.tokens[:3] }),
		with(func(e *wireEvent) { e.tokens, e.blockSize = nil, 0 }),
		with(func(e *wireEvent) { e.tokens, e.blockSize = e.tokens[:2], 2 }),
		pack(nil, []any{"BlockMoved", 1}),
		wireEvent{kind: "BlockRemoved", hashes: []any{1}, more: map[string]any{"group_idx": 1}}.asMap(),
		wireEvent{kind: "BlockRemoved", hashes: []any{1}, medium: "TAPE"}.asMap(),
	}
	e.publish(wireBatch(nil, append([][]byte{plain.asMap()}, ignored...)...))
	r.await("ignored", len(ignored))
	if got := r.index.CachedBlocks(r.rank.Slot); got != 1 || r.get("ignored") != len(ignored) {
		t.Errorf("%d held, counted %v", got, r.n)
	}
	orphan := plain
	orphan.parent, orphan.hashes = 99, []any{98}
	host := plain
	host.medium = "CPU_PINNED"
	e.publish(wireBatch(nil, orphan.asMap(), host.asArray(), plain.asMap(),
		wireEvent{kind: "BlockRemoved", hashes: []any{1, 77}, medium: "GPU"}.asMap()))
	r.await("unknown_removed", 1)
	for counter, want := range map[string]int{"orphans": 1, "duplicate": 1, "stored": 2, "removed": 1} {
		if got := r.get(counter); got != want {
			t.Errorf("%s: %d, want %d", counter, got, want)
		}
	}
	if got := r.index.CachedBlocks(r.rank.Slot); got != 1 {
		t.Errorf("%d held, want the host's copy", got)
	}
	larger := wireEvent{hashes: []any{5}, tokens: []any{1, 2, 3, 4, 5, 6, 7, 8}, blockSize: 8}
	e.publish(wireBatch(nil, larger.asMap()))
	r.await("resets", 1)
	if got := r.index.CachedBlocks(r.rank.Slot); got != 1 || r.rank.EventBlockSize.Load() != 8 {
		t.Errorf("after a larger block: %d held, block size %d", got, r.rank.EventBlockSize.Load())
	}
	waitSettled(r, e)
	if got := r.index.CachedBlocks(r.rank.Slot); got != 0 {
		t.Errorf("%d held after AllBlocksCleared", got)
	}
}

func TestTopic(t *testing.T) {
	e := newEngine(t, false)
	e.topic = "kv@w1"
	r := newFeedHarness(t, e, nil)
	r.src.Topic = "kv@w1"
	r.start()
	e.subscribed()
	r.awaitOpen()
	all := batches(newEventWriter(36, 1), 5)
	for _, b := range all {
		e.publish(b)
	}
	e.topic = "kv@w10" // begins with the topic, and is another's
	e.send(0, newEventWriter(37, 1).batch())
	r.await("malformed", 1)
	r.indexEquals(all...)
}

func TestStartRefuses(t *testing.T) {
	feeds := NewFeeds(Options{Index: kvindex.New(kvindex.Options{})})
	rank := worker.New(worker.Spec{ID: "w"}).Ranks[0]
	for _, endpoint := range []string{"", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:port", "carrier://pigeon:1"} {
		if err := feeds.Start(Source{Rank: rank, Endpoint: endpoint}); err == nil || !strings.HasPrefix(err.Error(), "kvevents: cannot subscribe to ") {
			t.Errorf("endpoint %q: error %v", endpoint, err)
		}
	}
	if err := feeds.Start(Source{Endpoint: "tcp://127.0.0.1:1"}); err == nil {
		t.Error("a source without a rank was taken")
	}
	feeds.Stop(worker.ID{Worker: "nobody"})
	feeds.Close()
	feeds.Close()
	if err := feeds.Start(Source{Rank: rank, Endpoint: "tcp://127.0.0.1:1"}); err == nil {
		t.Error("Start after Close was taken")
	}
}

func TestStopIsPrompt(t *testing.T) {
	// 200 ms is what is meant; the slack is for a busy machine.
	const limit = 2 * time.Second
	prompt := func(t *testing.T, r *feedHarness) {
		t.Helper()
		begun := time.Now()
		r.feeds.Stop(r.rank.ID)
		if took := time.Since(begun); took > limit {
			t.Errorf("Stop took %v", took)
		}
	}
	t.Run("idle", func(t *testing.T) {
		r, _ := newLiveHarness(t, nil)
		prompt(t, r)
	})
	t.Run("nobody_there", func(t *testing.T) {
		e := newEngine(t, false)
		r := newFeedHarness(t, e, nil)
		r.src.Endpoint = "tcp://127.0.0.1:1"
		r.start()
		prompt(t, r)
	})
	t.Run("replay_does_not_answer", func(t *testing.T) {
		e := newEngine(t, true)
		e.set(func() { e.unresponsive = true })
		r := newFeedHarness(t, e, func(o *Options) { o.ReplayTimeout = time.Hour })
		r.start()
		testwait.Until(t, "a question", func() bool { e.mu.Lock(); defer e.mu.Unlock(); return len(e.requested) > 0 })
		prompt(t, r)
	})
	t.Run("replay_drips", func(t *testing.T) {
		e := newEngine(t, true)
		e.set(func() { e.pause = 20 * time.Millisecond })
		for _, b := range batches(newEventWriter(38, 1), 5000) {
			e.store(b)
		}
		r := newFeedHarness(t, e, nil)
		r.start()
		testwait.Until(t, "a question", func() bool { e.mu.Lock(); defer e.mu.Unlock(); return len(e.requested) > 0 })
		prompt(t, r)
	})
	t.Run("waiting_to_retry", func(t *testing.T) {
		e := newEngine(t, true)
		e.set(func() { e.unresponsive = true })
		r := newFeedHarness(t, e, func(o *Options) { o.ReplayTimeout, o.RetryMin = time.Millisecond, time.Hour })
		r.start()
		r.awaitState(worker.FeedBroken)
		prompt(t, r)
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc to count descriptors in")
	}
	return len(entries)
}

func TestNothingLeaks(t *testing.T) {
	e := newEngine(t, true)
	all := batches(newEventWriter(39, 1), 20)
	for _, b := range all {
		e.store(b)
	}
	round := func() {
		r := newFeedHarness(t, e, nil)
		r.start()
		r.start() // replaces the first
		r.awaitOpen()
		r.indexEquals(all...)
		for range 3 {
			if r.feeds.Start(Source{Rank: r.rank, Endpoint: "nonsense"}) == nil {
				t.Error("nonsense was taken")
			}
		}
		r.feeds.Close()
	}
	round()
	runtime.GC()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	for range 5 {
		round()
	}
	testwait.Until(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines })
	// The engine's own side closes its descriptors when it notices.
	testwait.Until(t, "descriptors are closed", func() bool { return openFiles(t) <= files+2 })
}

func TestManyRanks(t *testing.T) {
	const ranks = 20
	r := &feedHarness{t: t, index: kvindex.New(kvindex.Options{})}
	r.feeds = NewFeeds(Options{Index: r.index, Counters: r})
	t.Cleanup(r.feeds.Close)
	var payloads [][]byte
	var engines []*engine
	for n := range uint16(ranks) {
		e := newEngine(t, n%2 == 0)
		w := worker.New(worker.Spec{ID: "w", Ranks: []uint16{n}})
		w.Ranks[0].Slot = worker.Slot(n)
		if err := r.feeds.Start(Source{Rank: w.Ranks[0], Model: "m", Endpoint: e.Endpoint, ReplayEndpoint: e.Replay}); err != nil {
			t.Fatal(err)
		}
		e.subscribed()
		engines = append(engines, e)
	}
	for range 20 {
		payloads = append(payloads, bytes.Clone(newEventWriter(40, 1).batch()))
	}
	for _, e := range engines {
		for _, p := range payloads {
			e.publish(p)
		}
	}
	for n := range worker.Slot(ranks) {
		r.rank = &worker.Rank{Slot: n}
		want := r.describe(r.oracle(payloads...))
		testwait.Until(t, "every rank", func() bool { return r.describe(r.index) == want })
	}
}

// An engine whose numbers make no sense is counted, each time, and not logged each time.
func TestNumbersThatJump(t *testing.T) {
	var log syncLines
	r, e := newLiveHarness(t, func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	began := time.Now()
	const times = 500
	payload := newEventWriter(43, 1).batch()
	e.send(0, payload)
	for range times {
		e.send(1<<63, payload)
		e.send(7, payload)
	}
	r.await("gaps", times)
	r.await("restarts", times)
	if most := int64(2 + time.Since(began)/time.Second); log.n.Load() > most {
		t.Errorf("%d lines for %d gaps and restarts, want %d at most", log.n.Load(), 2*times, most)
	}
}

// syncLines counts what is written.
type syncLines struct{ n atomic.Int64 }

func (l *syncLines) Write(b []byte) (int, error) {
	l.n.Add(1)
	return len(b), nil
}
