package kvevents

import (
	"fmt"
	"testing"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Blocks are credited to the worker that reports them where they lie with it: on its GPU
// and in its memory, whatever it reports; in storage only if it reports that.
func TestUncreditedBlocks(t *testing.T) {
	for _, c := range []struct {
		medium, locality any
		held             bool
		kind             string
	}{
		{"GPU", nil, true, ""}, {nil, nil, true, ""}, {"CPU", nil, true, ""}, {"CPU_PINNED", nil, true, ""}, {"DISK", nil, true, ""},
		{"CPU", "LOCAL", true, ""}, {"CPU", "REMOTE", false, "remote"}, {"GPU", "REMOTE", false, "remote"}, {"DISK", "REMOTE", false, "remote"},
		{"FS", nil, false, "unknown_locality"}, {"FS", "LOCAL", true, ""}, {"FS", "REMOTE", false, "remote"},
		{"OBJ", nil, false, "unknown_locality"}, {"OBJ", "LOCAL", true, ""}, {"STORAGE", nil, false, "unknown_locality"}, {"STORAGE", "LOCAL", true, ""},
		{"STORAGE", "REMOTE", false, "remote"}, {"STORAGE", "NEARBY", false, "remote"}, {"EXTERNAL", nil, false, "unknown_locality"}, {"FLOPPY", nil, false, "ignored"},
	} {
		t.Run(fmt.Sprint(c.medium, " ", c.locality), func(t *testing.T) {
			a := applierOf(t)
			a.Uncredited = &UncreditedBlocks{}
			size := wireEvent{hashes: []any{1}, tokens: []any{1, 2, 3, 4}, blockSize: 4, medium: "GPU"}
			if err := a.Apply(wireBatch(nil, size.asMap())); err != nil {
				t.Fatal(err)
			}
			e := wireEvent{hashes: []any{7, 8}, tokens: []any{5, 6, 7, 8, 9, 10, 11, 12}, blockSize: 4, medium: c.medium,
				more: map[string]any{"locality": c.locality}}
			before := a.Index.CachedBlocks(a.Rank.Slot)
			if err := a.Apply(wireBatch(nil, e.asMap())); err != nil {
				t.Fatal(err)
			}
			if cached := a.Index.CachedBlocks(a.Rank.Slot) > before; cached != c.held {
				t.Errorf("held: %v, want %v", cached, c.held)
			}
			if c.kind != "" && a.counts[c.kind] != 1 {
				t.Errorf("counted %v, want one %s", a.counts, c.kind)
			}
			medium, _ := c.medium.(string)
			for kind, locality := range map[string]string{"remote": LocalityRemote, "unknown_locality": LocalityUnspecified} {
				want, at := uint64(0), medium
				if c.kind == kind {
					want = 2
				}
				if at == "GPU" || at == "CPU" || at == "DISK" || at == "CPU_PINNED" || at == "" {
					at = "other"
				}
				if n := a.Uncredited.Blocks(at, locality); n != want {
					t.Errorf("%d blocks of %s are %s, want %d", n, at, locality, want)
				}
			}
		})
	}
}

// A group of attention with sinks is as good as any of full attention: each block depends
// on all before it, and none is dropped while the prompt lasts.
func TestSinkFullAttention(t *testing.T) {
	for _, kind := range []string{"full_attention", "mla_attention", "sink_full_attention"} {
		a := applierOf(t)
		stored := func(group int, kind string, hash int) []byte {
			return wireEvent{hashes: []any{hash}, tokens: []any{hash, 2, 3, 4}, blockSize: 4, medium: "GPU",
				more: map[string]any{"group_idx": group, "kv_cache_spec_kind": kind}}.asMap()
		}
		if err := a.Apply(wireBatch(nil, stored(0, "sliding_window", 5), stored(1, kind, 6), stored(1, kind, 7))); err != nil {
			t.Fatal(err)
		}
		if cached := a.Index.CachedBlocks(a.Rank.Slot); cached != 2 {
			t.Errorf("%s: %d blocks held, want the 2 of group 1", kind, cached)
		}
	}
}

// Events bear the engine's own number of the rank, which on a second node is not the one
// that its server knows it by.
func TestEventsOfASecondNode(t *testing.T) {
	w := worker.New(worker.Spec{ID: "w", URL: "http://127.0.0.1:1", Ranks: []uint16{0, 1}, StartRank: 8})
	a := NewApplier(kvindex.New(kvindex.Options{}), w.Ranks[1], "m", "vllm")
	e := wireEvent{hashes: []any{1}, tokens: []any{1, 2, 3, 4}, blockSize: 4, medium: "GPU"}
	for rank, want := range map[int]int{1: 0, 8: 0, 9: 1} {
		a.Index.Clear(a.Rank.Slot)
		if err := a.Apply(wireBatch(rank, e.asMap())); err != nil {
			t.Fatal(err)
		}
		if cached := a.Index.CachedBlocks(a.Rank.Slot); cached != want {
			t.Errorf("a batch of rank %d: %d blocks held, want %d", rank, cached, want)
		}
	}
}
