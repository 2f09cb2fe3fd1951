package kvindex

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// The slots exercise the inline word, its last bit, lists and sets of those above,
// near and far.
var testSlots = []worker.Slot{0, 3, 63, 64, 65, 200, 600, 1030, 2000, worker.MaxSlots - 1}

var testSalts = []blockhash.Salt{1, 2, 3}

// op is one step of a history. Everything it needs is in it, so that histories
// can be cut down and printed.
type op struct {
	kind   string // store, remove, clear, find
	ev     Stored
	slot   worker.Slot
	tier   Tier
	engine []EngineHash
	seqs   []blockhash.Seq
}

func (o op) String() string {
	switch o.kind {
	case "store":
		return fmt.Sprintf("store slot=%d tier=%v salt=%d parent=%v/%d engine=%d local=%d",
			o.ev.Slot, o.ev.Tier, o.ev.Salt, o.ev.HasParent, o.ev.Parent, o.ev.Engine, o.ev.Local)
	case "remove":
		return fmt.Sprintf("remove slot=%d tier=%v engine=%d", o.slot, o.tier, o.engine)
	case "clear":
		return fmt.Sprintf("clear slot=%d", o.slot)
	}
	return fmt.Sprintf("find %x", o.seqs)
}

// generate makes a history. Three local hashes and short chains make prompts
// meet often; engine hashes come from a small range, so they are repeated,
// reused for other content, unknown, and shared between ranks and tiers.
func generate(rng *rand.Rand, n int) []op {
	hash := func() EngineHash { return EngineHash(rng.IntN(40)) }
	locals := func(n int) []blockhash.Local {
		ls := make([]blockhash.Local, n)
		for i := range ls {
			ls[i] = blockhash.Local(1 + rng.IntN(3))
		}
		return ls
	}
	hashes := func(n int) []EngineHash {
		hs := make([]EngineHash, n)
		for i := range hs {
			hs[i] = hash()
		}
		return hs
	}
	ops := make([]op, 0, n)
	for len(ops) < n {
		slot, tier := testSlots[rng.IntN(len(testSlots))], Tier(rng.IntN(int(NumTiers)))
		if rng.IntN(3) > 0 {
			tier = Device
		}
		switch p := rng.IntN(100); {
		case p < 45:
			blocks := 1 + rng.IntN(5)
			ops = append(ops, op{kind: "store", ev: Stored{
				Slot: slot, Tier: tier, Salt: testSalts[rng.IntN(len(testSalts))],
				HasParent: rng.IntN(3) > 0, Parent: hash(), Engine: hashes(blocks), Local: locals(blocks),
			}})
		case p < 70:
			ops = append(ops, op{kind: "remove", slot: slot, tier: tier, engine: hashes(1 + rng.IntN(4))})
		case p < 71:
			ops = append(ops, op{kind: "clear", slot: slot})
		default:
			var seqs []blockhash.Seq
			seq := blockhash.Seq(testSalts[rng.IntN(len(testSalts))])
			for _, l := range locals(rng.IntN(8)) {
				seq = blockhash.Next(seq, l)
				seqs = append(seqs, seq)
			}
			ops = append(ops, op{kind: "find", seqs: seqs})
		}
	}
	return ops
}

// apply does one step and says what came of it, in words that can be compared.
func apply(ix Index, o op) string {
	switch o.kind {
	case "store":
		return fmt.Sprintf("%+v held=%d", ix.Store(&o.ev), ix.CachedBlocks(o.ev.Slot))
	case "remove":
		removed, unknown := ix.Remove(o.slot, o.tier, o.engine)
		return fmt.Sprintf("removed=%d unknown=%d held=%d len=%d", removed, unknown, ix.CachedBlocks(o.slot), ix.Len())
	case "clear":
		return fmt.Sprintf("cleared=%d len=%d", ix.Clear(o.slot), ix.Len())
	}
	var got Overlap
	ix.Find(o.seqs, &got)
	return depths(&got)
}

func depths(o *Overlap) string {
	var b strings.Builder
	any := false
	fmt.Fprintf(&b, "max=%d holders=%d", o.Max(), len(o.Holders()))
	for _, s := range testSlots {
		host, disk := o.LowerTiers(s)
		fmt.Fprintf(&b, " %d:%d-%d-%d", s, o.Depth(s), host, disk)
		any = any || host+disk > 0
	}
	fmt.Fprintf(&b, " below=%v %v", any == o.AnyLowerTier(), o.Frequencies(nil))
	return b.String()
}

// soak: this is the long run.
var soak = os.Getenv("SLUICE_SOAK") != ""

// runHistory is play, but for the test of minimise.
var runHistory = play

// play plays a history on both and returns the first difference.
func play(ops []op) error {
	ix, model := New(Options{}), NewNaive()
	for i, o := range ops {
		got, want := apply(ix, o), apply(model, o)
		if got != want {
			return fmt.Errorf("step %d: %v:\n  got  %s\n  want %s", i, o, got, want)
		}
		if err := ix.(*radix).check(); err != nil {
			return fmt.Errorf("step %d: %v: %w", i, o, err)
		}
	}
	for _, s := range testSlots {
		ix.Clear(s)
	}
	if ix.Len() != 0 || ix.Bytes() != 0 {
		return fmt.Errorf("after clearing every rank: %d entries, %d bytes", ix.Len(), ix.Bytes())
	}
	return ix.(*radix).check()
}

// minimise cuts a failing history down: first large pieces, then single steps.
func minimise(ops []op) []op {
	for size := len(ops) / 2; size > 0; size /= 2 {
		for i := 0; i+size <= len(ops); {
			if shorter := slices.Concat(ops[:i], ops[i+size:]); runHistory(shorter) != nil {
				ops = shorter
			} else {
				i += size
			}
		}
	}
	return ops
}

// envInt is a number from the environment; short runs are given a third of the
// usual, soaks ten times.
func envInt(name string, or int) int {
	switch {
	case name == "KVINDEX_SEED":
	case soak:
		or *= 10
	case testing.Short():
		or = max(1, or/3)
	}
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return or
}

// KVINDEX_SEED is the first seed, KVINDEX_SEEDS how many, KVINDEX_OPS the
// length of each history.
func TestMetamorphic(t *testing.T) {
	first, seeds, n := envInt("KVINDEX_SEED", 1), envInt("KVINDEX_SEEDS", 10), envInt("KVINDEX_OPS", 1500)
	for seed := first; seed < first+seeds; seed++ {
		ops := generate(rand.New(rand.NewPCG(uint64(seed), 0)), n)
		err := play(ops)
		if err == nil {
			continue
		}
		small := minimise(ops)
		var b strings.Builder
		for i, o := range small {
			fmt.Fprintf(&b, "%4d %v\n", i, o)
		}
		t.Fatalf("KVINDEX_SEED=%d: %v\nminimised to %d of %d steps: %v\n%s", seed, err, len(small), len(ops), play(small), b.String())
	}
	t.Logf("reliability 9: %d seeds of %d operations, the index equal to the model after each", seeds, n)
}

// TestMetamorphicSoak is TestMetamorphic at length: a million operations of each of 64
// seeds, half of them engines' traffic. The whole index is checked now and then.
// SLUICE_SOAK_SEEDS=10-64 plays some of them, so that hours can be had in pieces.
func TestMetamorphicSoak(t *testing.T) {
	if !soak {
		t.Skip("SLUICE_SOAK=1 runs it")
	}
	defer func(step int) { moveStep = step }(moveStep)
	moveStep = 64
	mapSmallTables(t)
	const n = 1_000_000
	first, seeds := 1, 64
	if some := os.Getenv("SLUICE_SOAK_SEEDS"); some != "" {
		if _, err := fmt.Sscanf(some, "%d-%d", &first, &seeds); err != nil || first < 1 || seeds < first {
			t.Fatalf("SLUICE_SOAK_SEEDS=%q: want FIRST-LAST, such as 10-64", some)
		}
	}
	var next atomic.Int64
	next.Store(int64(first) - 1)
	var players sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		players.Go(func() {
			for seed := int(next.Add(1)); seed <= seeds && !t.Failed(); seed = int(next.Add(1)) {
				if err := playLong(uint64(seed), n); err != nil {
					t.Errorf("seed %d: %v", seed, err)
				} else {
					t.Logf("seed %d: %d operations equal the model", seed, n)
				}
			}
		})
	}
	players.Wait()
}

// playLong plays a long history in pieces on one index and one model.
func playLong(seed uint64, n int) error {
	rng := rand.New(rand.NewPCG(seed, 21))
	ix, model := New(Options{}), NewNaive()
	var got, want Overlap
	var freq [2][]uint32
	for done := 0; done < n; {
		ops := generate(rng, 2000)
		if seed%2 == 0 {
			ops = traffic(rng, 2000, 12)
		}
		for i, o := range ops {
			same := true
			switch o.kind {
			case "store":
				same = ix.Store(&o.ev) == model.Store(&o.ev)
			case "remove":
				a, b := ix.Remove(o.slot, o.tier, o.engine)
				c, d := model.Remove(o.slot, o.tier, o.engine)
				same = a == c && b == d
			case "clear":
				same = ix.Clear(o.slot) == model.Clear(o.slot)
			default:
				ix.Find(o.seqs, &got)
				model.Find(o.seqs, &want)
				freq[0], freq[1] = got.Frequencies(freq[0]), want.Frequencies(freq[1])
				same = got.Max() == want.Max() && slices.Equal(freq[0], freq[1]) && len(got.Holders()) == len(want.Holders())
				for _, slot := range want.Holders() {
					h, d := got.LowerTiers(slot)
					h2, d2 := want.LowerTiers(slot)
					same = same && got.Depth(slot) == want.Depth(slot) && h == h2 && d == d2
				}
			}
			if !same {
				return fmt.Errorf("step %d: %v", done+i, o)
			}
		}
		done += len(ops)
		if err := ix.(*radix).check(); err != nil || ix.Len() != model.Len() {
			return fmt.Errorf("after %d steps: %d entries, want %d: %w", done, ix.Len(), model.Len(), err)
		}
	}
	return nil
}

// The minimiser itself must work on the day it is needed.
func TestMinimise(t *testing.T) {
	defer func() { runHistory = play }()
	culprits := func(ops []op) (n int) {
		for _, o := range ops {
			if o.kind == "clear" && o.slot == 999 {
				n++
			}
		}
		return n
	}
	runHistory = func(ops []op) error {
		if culprits(ops) == 2 {
			return fmt.Errorf("two clears of slot 999")
		}
		return nil
	}
	ops := generate(rand.New(rand.NewPCG(9, 9)), 200)
	ops = slices.Insert(ops, 120, op{kind: "clear", slot: 999})
	ops = slices.Insert(ops, 30, op{kind: "clear", slot: 999})
	if got := minimise(ops); len(got) != 2 || culprits(got) != 2 {
		t.Errorf("minimised to %v, want the two failing steps alone", got)
	}
}
