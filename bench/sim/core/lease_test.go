package core

import (
	"context"
	"testing"
	"time"

	"sluice/bench/sim/options"
)

// newTestRank returns a rank that does not run, so that the test may call its methods.
func newTestRank(t *testing.T) *Rank {
	t.Helper()
	o, err := options.Options{Blocks: 16, BlockSize: 4, LogBlocks: true}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{Options: &o, ID: "e", Context: context.Background(), Go: func(f func()) { go f() }, Blocks: NewBlockLog(true)}
	r := NewRank(p, 0)
	p.Ranks = []*Rank{r}
	return r
}

// newTestSeq returns a sequence of tokens tokens that has its blocks.
func newTestSeq(t *testing.T, r *Rank, id string, tokens int) *Seq {
	t.Helper()
	j := NewJob(nil, nil)
	j.BlockLogID = id
	s := &Seq{Job: j}
	s.Prompt = make([]uint32, tokens)
	j.Seqs = append(j.Seqs, s)
	if !r.allocate(s, tokens+1) {
		t.Fatal("no blocks")
	}
	return s
}

// TestLeases checks that a lease keeps the blocks of a prompt until it expires or another lease replaces
// it, and that no block is lost or freed twice.
func TestLeases(t *testing.T) {
	r := newTestRank(t)
	free := r.pool.Free
	now := time.Now()
	l := r.Lease("a", newTestSeq(t, r, "a", 8), time.Minute)
	if len(l.Blocks) != 2 || r.pool.Free != free-2 {
		t.Errorf("%d blocks are leased, %d of %d are free; want 2, without that of the output token", len(l.Blocks), r.pool.Free, free)
	}
	r.Lease("b", newTestSeq(t, r, "b", 4), time.Hour)
	if r.Lease("b", newTestSeq(t, r, "b", 12), time.Hour); r.Counters.RoomsReused != 1 || r.leases.blocks() != 5 || r.pool.Free != free-5 {
		t.Errorf("a key used twice: %d counted, %d blocks leased, %d of %d free", r.Counters.RoomsReused, r.leases.blocks(), r.pool.Free, free)
	}
	if r.Expire(now.Add(30 * time.Second)); r.Leased("a") == nil {
		t.Error("a lease expired early")
	}
	if r.Expire(now.Add(2 * time.Minute)); r.Leased("a") != nil || r.Leased("b") == nil || r.Counters.Expired != 1 {
		t.Errorf("after the first lease's end: %v, %v, %d expired", r.Leased("a"), r.Leased("b"), r.Counters.Expired)
	}
	if r.Expire(now.Add(2 * time.Hour)); r.pool.Free != free || r.leases.blocks() != 0 {
		t.Errorf("%d of %d blocks are free after all leases", r.pool.Free, free)
	}
}

// TestTransferOutlivesJob checks that the blocks of a transfer stay with it when its job ends, and are freed
// when the transfer ends.
func TestTransferOutlivesJob(t *testing.T) {
	for _, end := range map[string]func(r *Rank, s *Seq){
		"TransferDone": func(r *Rank, s *Seq) { r.TransferDone(s, 8, 8) },
		"failed":       func(r *Rank, s *Seq) { r.TransferDone(s, 0, 0) },
		"UnholdBlocks": func(r *Rank, s *Seq) { r.UnholdBlocks(s) },
	} {
		r := newTestRank(t)
		free := r.pool.Free
		s := newTestSeq(t, r, "x", 8)
		r.Transfer(s)
		r.drop(s.Job)
		s.Job.ended = true
		if r.pool.Free == free {
			t.Error("the end of the job freed the blocks of a transfer")
		}
		if end(r, s); r.pool.Free != free || s.Transferring() {
			t.Errorf("%d of %d blocks are free after the transfer", r.pool.Free, free)
		}
	}
}
