package kvevents

import (
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// A message that a publisher drops last leaves no gap, so the feed requests a replay.
func TestTailCheck(t *testing.T) {
	layouts(t, func(t *testing.T, e *engine) {
		s := newEventWriter(30, 1)
		all := batches(s, 40)
		r := newFeedHarness(t, e, func(o *Options) { o.TailCheck = 20 * time.Millisecond })
		r.start()
		e.subscribed()
		r.awaitState(worker.FeedLive)
		for _, b := range all[:25] {
			e.publish(b)
		}
		r.indexEquals(all[:25]...)
		for _, b := range all[25:] {
			e.store(b) // published, and dropped by a full queue
		}
		e.publish(wireBatch(nil)) // one gets through, then silence
		for range 3 {
			e.store(wireBatch(nil))
		}
		r.indexEquals(all...)
		testwait.Until(t, "a tail check", func() bool { return r.get("tail_checks") > 0 })
		if r.get("resets")+r.get("restarts") != 0 {
			t.Errorf("counted %v", r.n)
		}
	})
}

func TestTailCheckWithNothingMissing(t *testing.T) {
	e := newEngine(t, true)
	s := newEventWriter(31, 1)
	all := batches(s, 40)
	r := newFeedHarness(t, e, func(o *Options) { o.TailCheck = 20 * time.Millisecond })
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedLive)
	for _, b := range all[:25] {
		e.publish(b)
	}
	r.await("batches", 25)
	for _, b := range all[25:] {
		e.store(b)
	}
	r.indexEquals(all...)
	if r.get("resets")+r.get("restarts")+r.get("gaps") != 0 {
		t.Errorf("counted %v", r.n)
	}
}

// resumed is a rig whose index holds what an earlier router had learned of these
// batches, and its position.
func resumed(t *testing.T, e *engine, incarnation [][]byte) *feedHarness {
	first := newFeedHarness(t, e, nil)
	first.start()
	e.subscribed()
	first.awaitState(worker.FeedLive)
	for _, b := range incarnation {
		e.publish(b)
	}
	first.indexEquals(incarnation...)
	var pos Position
	testwait.Until(t, "a position", func() (ok bool) {
		pos, ok = first.feeds.Position(first.rank.ID)
		return ok && pos.Next == uint64(len(incarnation))
	})
	first.feeds.Close()

	r := newFeedHarness(t, e, nil)
	f := &feed{source: Source{Rank: r.rank}, options: &Options{MaxFrame: 1 << 30}, Applier: NewApplier(r.index, r.rank, "m", "")}
	for i, b := range incarnation {
		f.apply(uint64(i), b)
	}
	r.rank.EventBlockSize.Store(0)
	r.src.Resume = &pos
	return r
}

func TestResumeOfTheSameIncarnation(t *testing.T) {
	layouts(t, func(t *testing.T, e *engine) {
		all := batches(newEventWriter(32, 1), 60)
		r := resumed(t, e, all[:40])
		for _, b := range all[40:50] {
			e.store(b) // while no router was there
		}
		e.set(func() { e.requested = nil })
		r.start()
		e.subscribed()
		r.awaitState(worker.FeedLive)
		for _, b := range all[50:] {
			e.publish(b)
		}
		r.indexEquals(all...)
		if r.get("resets")+r.get("restarts") != 0 || r.get("replayed_batches") > 11 {
			t.Errorf("counted %v, want the gap replayed and no more", r.n)
		}
		e.set(func() {
			if len(e.requested) == 0 || e.requested[0] != 39 {
				t.Errorf("asked from %v, want 39, the last message applied", e.requested)
			}
		})
		if r.rank.EventBlockSize.Load() == 0 {
			t.Error("the block size was not taken up")
		}
	})
}

func TestResumeDropsUnverified(t *testing.T) {
	incarnation := batches(newEventWriter(33, 1), 40)
	for name, change := range map[string]func(e *engine, r *feedHarness) [][]byte{
		"another life, as far": func(e *engine, r *feedHarness) [][]byte {
			e.restart()
			other := batches(newEventWriter(34, 2), 40)
			for _, b := range other {
				e.store(b)
			}
			return other
		},
		"another life, further": func(e *engine, r *feedHarness) [][]byte {
			e.restart()
			other := batches(newEventWriter(35, 2), 60)
			for _, b := range other {
				e.store(b)
			}
			return other
		},
		"another life, nothing yet": func(e *engine, r *feedHarness) [][]byte { e.restart(); return nil },
		"not kept any more": func(e *engine, r *feedHarness) [][]byte {
			for range 10 {
				e.store(wireBatch(nil))
			}
			e.set(func() {
				for seq := range uint64(45) {
					delete(e.stored, seq)
				}
			})
			return nil
		},
		"no replay": func(e *engine, r *feedHarness) [][]byte { r.src.ReplayEndpoint = ""; return nil },
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, true)
			r := resumed(t, e, incarnation)
			if r.index.CachedBlocks(r.rank.Slot) == 0 {
				t.Fatal("nothing was held before: this test shows nothing")
			}
			left := change(e, r)
			r.start()
			e.subscribed()
			r.awaitOpen()
			r.indexEquals(left...)
		})
	}
	t.Run("an engine that never comes", func(t *testing.T) {
		e := newEngine(t, true)
		r := resumed(t, e, incarnation)
		e.closePublisher()
		r.feeds.opt.ReplayTimeout = 20 * time.Millisecond // no feed reads it yet
		r.start()
		testwait.Until(t, "the rank is dropped", func() bool { return r.index.CachedBlocks(r.rank.Slot) == 0 })
		r.awaitState(worker.FeedBroken)
		e.open(e.Endpoint)
	})
}

// groupEvent is a store of one block in a KV cache group.
func groupEvent(group int, kind string, hash int, size int) []byte {
	e := wireEvent{hashes: []any{hash}, blockSize: size, more: map[string]any{"group_idx": group}}
	for i := range size {
		e.tokens = append(e.tokens, 100*hash+i)
	}
	if kind != "" {
		e.more["kv_cache_spec_kind"] = kind
	}
	return e.asMap()
}

func applierOf(t *testing.T) *Applier {
	t.Helper()
	rank := worker.New(worker.Spec{ID: "w"}).Ranks[0]
	return NewApplier(kvindex.New(kvindex.Options{}), rank, "m", "vllm")
}

func (a *Applier) must(t *testing.T, events ...[]byte) {
	t.Helper()
	if err := a.Apply(wireBatch(nil, events...)); err != nil {
		t.Fatal(err)
	}
}

func TestTheGroupWithFullAttentionIsIndexed(t *testing.T) {
	a := applierOf(t)
	a.must(t, groupEvent(0, "sliding_window", 1, 8)) // for want of better
	a.must(t, groupEvent(1, "full_attention", 2, 4), groupEvent(0, "sliding_window", 3, 8), groupEvent(2, "mamba", 4, 4))
	if cached, size := a.Index.CachedBlocks(0), a.Rank.EventBlockSize.Load(); cached != 1 || size != 4 || a.counts["ignored"] != 2 || a.counts["resets"] != 1 {
		t.Errorf("%d held, blocks of %d, counted %v; want the full-attention group's alone", cached, size, a.counts)
	}
	removed := func(group int) []byte {
		return wireEvent{kind: "BlockRemoved", hashes: []any{2}, more: map[string]any{"group_idx": group}}.asMap()
	}
	a.must(t, removed(0))
	if a.Index.CachedBlocks(0) != 1 {
		t.Error("another group's removal took the block")
	}
	a.must(t, removed(1))
	if a.Index.CachedBlocks(0) != 0 {
		t.Error("its own removal did not")
	}
	a.must(t, groupEvent(0, "full_attention", 6, 4), groupEvent(1, "full_attention", 7, 4))
	if a.Index.CachedBlocks(0) != 1 || a.group != 0 {
		t.Errorf("of two groups with full attention, group %d counts, %d held", a.group, a.Index.CachedBlocks(0))
	}
}

func TestSlowerTiersMayHaveLargerBlocks(t *testing.T) {
	a := applierOf(t)
	tokens := func(from, n int) (out []any) {
		for i := range n {
			out = append(out, from+i)
		}
		return out
	}
	host := func(size int) []byte {
		return wireEvent{hashes: []any{51, 52}, tokens: tokens(0, 2*size), blockSize: size, medium: "CPU"}.asMap()
	}
	a.must(t, host(8))
	if a.Index.CachedBlocks(0) != 0 || a.Rank.EventBlockSize.Load() != 0 {
		t.Error("a slower tier's blocks were taken for the size of the rank's")
	}
	a.must(t, wireEvent{hashes: []any{1}, tokens: tokens(0, 4), blockSize: 4, medium: "GPU"}.asMap())
	a.must(t, host(8))
	next := wireEvent{hashes: []any{53}, parent: 52, tokens: tokens(16, 8), blockSize: 8, medium: "CPU"}
	a.must(t, next.asMap())
	if got := a.Index.CachedBlocks(0); got != 7 || a.Rank.EventBlockSize.Load() != 4 || a.counts["resets"] != 0 {
		t.Errorf("%d held, block size %d, counted %v; want 1 and 6 blocks of 4", got, a.Rank.EventBlockSize.Load(), a.counts)
	}
	a.must(t, host(12), host(6)) // neither a multiple nor the size it had
	if a.counts["ignored"] != 3 {
		t.Errorf("counted %v, want three ignored", a.counts)
	}
	a.must(t, wireEvent{kind: "BlockRemoved", hashes: []any{52}, medium: "CPU"}.asMap())
	if got := a.Index.CachedBlocks(0); got != 5 {
		t.Errorf("%d held after one of the larger blocks went, want 5", got)
	}
	a.must(t, wireEvent{kind: "BlockRemoved", hashes: []any{51, 53}, medium: "CPU"}.asMap())
	if got := a.Index.CachedBlocks(0); got != 1 || a.counts["unknown_removed"] != 0 {
		t.Errorf("%d held, counted %v", got, a.counts)
	}
}

// Short blocks of the device came first: what a slower tier's stood for then says
// nothing once the size is known.
func TestSlowerTiersAfterShortBlocks(t *testing.T) {
	a := applierOf(t)
	tokens := func(n int) (out []any) {
		for i := range n {
			out = append(out, i)
		}
		return out
	}
	a.must(t, wireEvent{hashes: []any{1}, tokens: tokens(4), blockSize: 4, medium: "GPU"}.asMap(),
		wireEvent{hashes: []any{51}, tokens: tokens(16), blockSize: 16, medium: "CPU"}.asMap(),
		wireEvent{hashes: []any{2}, tokens: tokens(16), blockSize: 16, medium: "GPU"}.asMap(),
		wireEvent{hashes: []any{51, 52}, tokens: tokens(32), blockSize: 16, medium: "CPU"}.asMap())
	if got := a.Index.CachedBlocks(0); got != 3 || a.counts["ignored"] != 0 {
		t.Errorf("%d held, counted %v; want one block on the device and two on the host", got, a.counts)
	}
	a.must(t, wireEvent{kind: "BlockRemoved", hashes: []any{51, 52}, medium: "CPU"}.asMap())
	if got := a.Index.CachedBlocks(0); got != 1 || a.counts["unknown_removed"] != 0 {
		t.Errorf("%d held, counted %v after the host's went", got, a.counts)
	}
}

// A removal may name as many blocks of a slower tier as its message has bytes, and
// each may be 256 router blocks: neither they nor a long event's lists stay in memory.
func TestLongEventsAreNotKept(t *testing.T) {
	a := applierOf(t)
	tokens := make([]any, 4*maxTierRatio)
	for i := range tokens {
		tokens[i] = i
	}
	a.must(t, wireEvent{hashes: []any{1}, tokens: tokens[:4], blockSize: 4, medium: "GPU"}.asMap(),
		wireEvent{hashes: []any{99}, tokens: tokens, blockSize: len(tokens), medium: "CPU"}.asMap())
	if got := a.Index.CachedBlocks(0); got != 1+maxTierRatio {
		t.Fatalf("%d held, want one block on the device and %d on the host", got, maxTierRatio)
	}
	hashes := make([]any, 3*maxPartHashes)
	for i := range hashes {
		hashes[i] = 100 + i
	}
	hashes[2*maxPartHashes+1] = 99
	a.must(t, wireEvent{kind: "BlockRemoved", hashes: hashes, medium: "CPU"}.asMap())
	if got := a.Index.CachedBlocks(0); got != 1 || a.counts["removed"] != maxTierRatio || a.counts["unknown_removed"] != (len(hashes)-1)*maxTierRatio {
		t.Errorf("%d held, counted %v", got, a.counts)
	}
	if cap(a.partHashes) > 2*maxPartHashes*maxTierRatio {
		t.Errorf("room for %d parts is kept", cap(a.partHashes))
	}
	long := make([]any, maxKeptEntries+1)
	for i := range long {
		long[i] = 1
	}
	a.must(t, wireEvent{kind: "BlockRemoved", hashes: long, medium: "GPU"}.asMap())
	if cap(a.event.Hashes) > maxKeptEntries {
		t.Errorf("room for %d hashes is kept", cap(a.event.Hashes))
	}
}

func TestVerifyPosition(t *testing.T) {
	layouts(t, func(t *testing.T, e *engine) {
		incarnation := batches(newEventWriter(36, 1), 20)
		r := resumed(t, e, incarnation)
		pos := r.src.Resume
		if err := r.feeds.VerifyPosition(r.src, pos, 10*time.Second); err != nil {
			t.Errorf("the same life: %v", err)
		}
		later := *pos
		later.Next += 5
		if r.feeds.VerifyPosition(r.src, &later, 10*time.Second) == nil {
			t.Error("an engine with fewer messages is taken for the same")
		}
		other := *pos
		other.LastHash++
		if r.feeds.VerifyPosition(r.src, &other, 10*time.Second) == nil {
			t.Error("another last message is taken for the same")
		}
		e.set(func() { delete(e.stored, pos.Next-1); e.stored[pos.Next] = incarnation[0]; e.next++ })
		if r.feeds.VerifyPosition(r.src, pos, 10*time.Second) == nil {
			t.Error("an engine that has forgotten is taken for the same")
		}
		e.set(func() { e.unresponsive = true })
		if r.feeds.VerifyPosition(r.src, pos, 50*time.Millisecond) == nil {
			t.Error("an engine that says nothing is taken for the same")
		}
		none := r.src
		none.ReplayEndpoint = ""
		if r.feeds.VerifyPosition(none, pos, time.Second) == nil {
			t.Error("an engine without replay is taken for the same")
		}
	})
}
