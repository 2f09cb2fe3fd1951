package kvindex

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"sluice/router/worker"
)

// A history of one prompt: ranks store its next block, remove their last one, and
// all depths are looked up. So every event is one change, and the promise of Find
// makes the index linearizable. The state is every rank's depth.

const linearRanks = 4

type linearOp struct {
	find  bool
	rank  int
	depth int // what a store or a removal makes of the rank's depth
}

type linearState [linearRanks]int

var linearModel = porcupine.Model{
	Init: func() any { return linearState{} },
	Step: func(state, input, output any) (bool, any) {
		s, in := state.(linearState), input.(linearOp)
		if in.find {
			return output.(linearState) == s, s
		}
		s[in.rank] = in.depth
		return output.(bool), s
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%v -> %v", input, output) },
}

func TestLinearizable(t *testing.T) {
	const blocks = 6
	// Ranks whose numbers use the inline word, the list, and a set.
	slots := [linearRanks]worker.Slot{2, 70, 900, 3000}
	jitters.Store(6)
	defer jitters.Store(0)
	overlaps := 0
	const enough = 1000
	rounds := envInt("KVINDEX_LINEAR_ROUNDS", 12)
	// On a machine that has little time for it fewer overlap: it is given more rounds.
	for round := 0; round < rounds || invariants && overlaps < enough && round < 5*rounds; round++ {
		ix := New(Options{})
		if round%2 == 1 { // others hold all: fragments are split and joined, not made and freed
			for slot := worker.Slot(1000); slot < 1006; slot++ {
				ev, _ := chain(slot, 1, blocks)
				ix.Store(&ev)
			}
		}
		var history [linearRanks + 2][]porcupine.Operation
		start := time.Now()
		do := func(client int, in linearOp, call func() any) {
			op := porcupine.Operation{ClientId: client, Input: in, Call: int64(time.Since(start))}
			op.Output = call()
			op.Return = int64(time.Since(start))
			history[client] = append(history[client], op)
		}
		var clients sync.WaitGroup
		gate := make(chan struct{})
		for rank, slot := range slots {
			clients.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(round), uint64(rank)))
				ev, _ := chain(slot, 1, blocks)
				depth := 0
				<-gate
				for range 300 {
					if depth < blocks && (depth == 0 || rng.IntN(2) == 0) {
						x := Stored{Slot: slot, Salt: ev.Salt, Engine: ev.Engine[depth : depth+1], Local: ev.Local[depth : depth+1]}
						if depth > 0 {
							x.HasParent, x.Parent = true, ev.Engine[depth-1]
						}
						depth++
						do(rank, linearOp{rank: rank, depth: depth}, func() any { return ix.Store(&x) == StoreResult{Added: 1} })
						continue
					}
					depth--
					do(rank, linearOp{rank: rank, depth: depth}, func() any {
						if depth == 0 && rng.IntN(2) == 0 {
							return ix.Clear(slot) == 1
						}
						removed, unknown := ix.Remove(slot, Device, ev.Engine[depth:depth+1])
						return removed == 1 && unknown == 0
					})
				}
			})
		}
		for reader := range 2 {
			clients.Go(func() {
				_, seqs := chain(0, 1, blocks)
				var o Overlap
				<-gate
				for range 600 {
					do(linearRanks+reader, linearOp{find: true}, func() any {
						ix.Find(seqs, &o)
						var s linearState
						for i, slot := range slots {
							s[i] = o.Depth(slot)
						}
						return s
					})
				}
			})
		}
		close(gate)
		clients.Wait()
		all := slices.Concat(history[:]...)
		slices.SortFunc(all, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
		for i := 1; i < len(all); i++ {
			if all[i].Call < all[i-1].Return {
				overlaps++
			}
		}
		switch porcupine.CheckOperationsTimeout(linearModel, all, 20*time.Second) {
		case porcupine.Illegal:
			for _, op := range all {
				t.Logf("%d…%d client %d: %s", op.Call, op.Return, op.ClientId, linearModel.DescribeOperation(op.Input, op.Output))
			}
			t.Fatalf("round %d has no order", round)
		case porcupine.Unknown:
			t.Logf("round %d was not decided in time", round)
		}
		if err := ix.(*radix).check(); err != nil {
			t.Fatal(err)
		}
	}
	if invariants && overlaps < enough { // without jitter it is left to the scheduler
		t.Errorf("%d operations overlapped: the test shows little", overlaps)
	}
}

// The model itself must be able to refuse.
func TestLinearizableRefuses(t *testing.T) {
	wrong := []porcupine.Operation{
		{ClientId: 0, Input: linearOp{depth: 5}, Output: true, Call: 0, Return: 10},
		{ClientId: 1, Input: linearOp{find: true}, Output: linearState{}, Call: 11, Return: 12},
	}
	if porcupine.CheckOperations(linearModel, wrong) {
		t.Error("a read that misses what was stored before it passes")
	}
}
