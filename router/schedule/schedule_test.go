package schedule

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/router/worker"
)

var testOptions = Options{OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1, HostWeight: 0.8, DiskWeight: 0.5, InFlightWeight: 0.9, Seed: 1}

func ranks(n int) []*worker.Rank {
	rs := make([]*worker.Rank, n)
	for i := range rs {
		w := worker.New(worker.Spec{ID: fmt.Sprintf("w%d", i), BlockSize: 16})
		w.Ranks[0].Slot = worker.Slot(i)
		rs[i] = w.Ranks[0]
	}
	return rs
}

// addLoad books tokens to prefill on a rank.
func addLoad(s *Scheduler, r *worker.Rank, tokens int) *Reservation {
	c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: []*worker.Rank{r}, PromptTokens: tokens})
	return c.Reservation
}

func mustZero(t *testing.T, rs []*worker.Rank) {
	t.Helper()
	for _, r := range rs {
		if p, d, n := r.PrefillTokens.Load(), r.DecodeBlocks.Load()|r.DecodeWork.Load(), r.Requests.Load(); p != 0 || d != 0 || n != 0 {
			t.Errorf("%v: load left over: %d tokens, %d blocks, %d requests", r.ID, p, d, n)
		}
	}
}

func TestChooseLeastLoaded(t *testing.T) {
	for _, c := range []struct {
		name string
		leg  LegKind
		load func(r *worker.Rank)
	}{
		{"prefill queue", PrefillLeg, func(r *worker.Rank) { r.PrefillTokens.Store(5000) }},
		{"decode blocks", DecodeLeg, func(r *worker.Rank) { r.DecodeWork.Store(100 * decodeSteps) }},
		{"whole: queue", WholeLeg, func(r *worker.Rank) { r.PrefillTokens.Store(5000) }},
		{"whole: blocks", WholeLeg, func(r *worker.Rank) { r.DecodeWork.Store(100 * decodeSteps) }},
		{"waiting", PrefillLeg, func(r *worker.Rank) { r.Waiting.Store(3) }},
		{"no room", DecodeLeg, func(r *worker.Rank) {
			r.Worker.SetInfo(&worker.Info{TotalBlocks: 100})
			r.SetKVUsage(0.99)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rs := ranks(3)
			c.load(rs[0])
			c.load(rs[2])
			s := New(testOptions)
			for range 20 {
				ch, ok := s.Choose(&Query{Leg: c.leg, Candidates: rs, PromptTokens: 1000, MaxTokens: 10})
				if !ok || ch.Rank != rs[1] {
					t.Fatalf("chose %v, want the unloaded %v", ch.Rank.ID, rs[1].ID)
				}
				ch.Reservation.Release()
			}
		})
	}
}

func TestOwnWaitingIsNotCountedTwice(t *testing.T) {
	rs := ranks(2)
	rs[0].Requests.Store(4)
	rs[0].Waiting.Store(4)
	s := New(testOptions)
	seen := map[*worker.Rank]bool{}
	for range 200 {
		c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 100})
		seen[c.Rank] = true
		c.Reservation.Release()
	}
	if len(seen) != 2 {
		t.Errorf("a rank whose waiting requests are all ours was avoided")
	}
}

func TestTiesAreDrawn(t *testing.T) {
	rs := ranks(5)
	s := New(testOptions)
	count := map[*worker.Rank]int{}
	const n = 5000
	for range n {
		c, _ := s.Choose(&Query{Candidates: rs, PromptTokens: 100})
		count[c.Rank]++
		c.Reservation.Release()
	}
	for _, r := range rs {
		if count[r] < n/5*8/10 || count[r] > n/5*12/10 {
			t.Errorf("%v drawn %d times of %d, want about %d", r.ID, count[r], n, n/5)
		}
	}
}

func TestBurstSpreads(t *testing.T) {
	for _, leg := range []LegKind{WholeLeg, PrefillLeg, DecodeLeg} {
		for _, pol := range []string{"kv", "least_loaded", "round_robin"} {
			rs := ranks(8)
			opt := testOptions
			opt.Policy = pol
			s := New(opt)
			start := make(chan struct{})
			var wg sync.WaitGroup
			res := make([][]*Reservation, 50)
			for g := range 50 {
				wg.Go(func() {
					<-start
					for i := range 20 {
						c, ok := s.Choose(&Query{Leg: leg, Candidates: rs, PromptTokens: 1000, MaxTokens: 100, RequestID: fmt.Sprint(g, "-", i), Attempt: 1})
						if !ok {
							t.Error("nothing chosen")
							return
						}
						res[g] = append(res[g], c.Reservation)
					}
				})
			}
			close(start)
			wg.Wait()
			for _, r := range rs {
				if n := r.Requests.Load(); n < 113 || n > 137 {
					t.Errorf("%s, %v: %v got %d of 1000, want 125 ± 10 %%", pol, leg, r.ID, n)
				}
			}
			for _, rr := range res {
				for _, r := range rr {
					r.Release()
				}
			}
			mustZero(t, rs)
		}
	}
}

// Any sequence of choices, prefill ends and releases, each repeated and from
// several goroutines, leaves nothing behind.
func TestLoadReturnsToZero(t *testing.T) {
	for seed := range uint64(20) {
		rs := ranks(4)
		opt := testOptions
		opt.Seed = seed + 1
		opt.Temperature = float64(seed%2) * 0.5
		s := New(opt)
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(g)))
				var cached []*Reservation
				for range 300 {
					switch rng.IntN(3) {
					case 0:
						c, _ := s.Choose(&Query{Leg: LegKind(rng.IntN(3)), Candidates: rs, PromptTokens: rng.IntN(5000), MaxTokens: rng.IntN(500)})
						cached = append(cached, c.Reservation)
					case 1:
						if len(cached) > 0 {
							cached[rng.IntN(len(cached))].PrefillDone()
						}
					case 2:
						if len(cached) > 0 {
							r := cached[rng.IntN(len(cached))]
							var two sync.WaitGroup
							two.Go(r.Release)
							two.Go(r.PrefillDone)
							two.Wait()
						}
					}
				}
				for _, r := range cached {
					r.Release()
					r.Release()
					r.PrefillDone()
				}
			})
		}
		wg.Wait()
		mustZero(t, rs)
	}
	var none *Reservation
	none.PrefillDone()
	none.Release()
}

func TestBooking(t *testing.T) {
	rs := ranks(1)
	s := New(testOptions)
	c, _ := s.Choose(&Query{Leg: WholeLeg, Candidates: rs, PromptTokens: 1000, MaxTokens: 25})
	if got := rs[0].DecodeBlocks.Load(); got != 65 {
		t.Errorf("blocks of 1000+25 tokens: %d, want 65", got)
	}
	if got := rs[0].PrefillTokens.Load(); got != 1000 {
		t.Errorf("prefill tokens %d, want 1000", got)
	}
	c.Reservation.PrefillDone()
	if p, n := rs[0].PrefillTokens.Load(), rs[0].Requests.Load(); p != 0 || n != 1 {
		t.Errorf("after prefill: %d tokens, %d requests", p, n)
	}
	c.Reservation.Release()
	mustZero(t, rs)
}

func TestExcluded(t *testing.T) {
	rs := ranks(3)
	for _, pol := range policyNames {
		opt := testOptions
		opt.Policy = pol
		s := New(opt)
		for range 30 {
			c, ok := s.Choose(&Query{Candidates: rs, Excluded: []*worker.Rank{rs[0], rs[2]}})
			if !ok || c.Rank != rs[1] {
				t.Fatalf("%s: chose %v", pol, c.Rank)
			}
			c.Reservation.Release()
		}
		if c, ok := s.Choose(&Query{Candidates: rs, Excluded: rs}); ok || c.Reservation != nil || c.Rank != nil {
			t.Errorf("%s: chose although all are excluded", pol)
		}
		if _, ok := s.Choose(&Query{}); ok {
			t.Errorf("%s: chose from nothing", pol)
		}
	}
	mustZero(t, rs)
}

func TestRoundRobinTakesTurns(t *testing.T) {
	rs := ranks(3)
	opt := testOptions
	opt.Policy = "round_robin"
	s := New(opt)
	for i := range 9 {
		c, _ := s.Choose(&Query{Candidates: rs})
		if c.Rank != rs[i%3] {
			t.Fatalf("turn %d went to %v", i, c.Rank.ID)
		}
	}
}

// Two legs take their turns apart: with one counter, alternating legs over two
// workers each would always get the same worker.
func TestRoundRobinTakesTurnsByLeg(t *testing.T) {
	p, d := ranks(2), ranks(2)
	opt := testOptions
	opt.Policy = "round_robin"
	s := New(opt)
	for i := range 6 {
		a, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: p})
		b, _ := s.Choose(&Query{Leg: DecodeLeg, Candidates: d})
		if a.Rank != p[i%2] || b.Rank != d[i%2] {
			t.Fatalf("request %d went to prefill %v and decode %v, want both turn %d", i, a.Rank.ID, b.Rank.ID, i%2)
		}
	}
}

func TestTemperatureLoosens(t *testing.T) {
	rs := ranks(3)
	rs[1].PrefillTokens.Store(1000)
	rs[2].PrefillTokens.Store(2000)
	share := func(temp float64) [3]int {
		opt := testOptions
		opt.Temperature = temp
		s := New(opt)
		var n [3]int
		for range 3000 {
			c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 10})
			n[c.Rank.Slot]++
			c.Reservation.Release()
		}
		return n
	}
	if n := share(0); n[0] != 3000 {
		t.Errorf("temperature 0: %v", n)
	}
	if n := share(1e-320); n[0] != 3000 {
		t.Errorf("next to no temperature: %v", n)
	}
	n := share(0.5) // weights 1, e^-1, e^-2
	for i, want := range []int{1996, 734, 270} {
		if n[i] < want*85/100 || n[i] > want*115/100 {
			t.Errorf("temperature 0.5: %v, want about 1996, 734, 270", n)
		}
	}
}

func decode(t *testing.T, s *Scheduler, id string) Record {
	t.Helper()
	b, ok := s.Explain(id)
	if !ok {
		t.Fatalf("%q is not known", id)
	}
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestExplain(t *testing.T) {
	rs := ranks(4)
	rs[3].PrefillTokens.Store(700)
	s := New(testOptions)
	c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, Excluded: rs[:1], PromptTokens: 1000, RequestID: "a", Attempt: 1})
	s.AddNote("a", "prefill failed: connection refused")
	s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, Excluded: []*worker.Rank{rs[0], c.Rank}, PromptTokens: 1000, RequestID: "a", Attempt: 2})
	s.Choose(&Query{Leg: DecodeLeg, Candidates: rs, PromptTokens: 1000, RequestID: "a", Attempt: 1})
	if r := decode(t, s, "a"); r.Outcome != nil {
		t.Error("a running request has an outcome")
	}
	s.EndRecord("a", Outcome{Status: 200, CachedTokens: 32, PromptTokens: 1000, OutputTokens: 7, TTFT: 80 * time.Millisecond, Total: time.Second})
	r := decode(t, s, "a")
	if len(r.Decisions) != 3 || len(r.Notes) != 1 || r.Outcome == nil || r.Outcome.TTFTMS != 80 || r.Outcome.CachedTokens != 32 {
		t.Fatalf("record: %+v", r)
	}
	d := r.Decisions[0]
	if d.Chosen != c.Rank.ID.String() || d.Candidates != 4 || d.Excluded != 1 || len(d.Shown) != 4 {
		t.Errorf("first decision: %+v", d)
	}
	for _, x := range d.Shown {
		sum := x.Terms.Prefill + x.Terms.Queue + x.Terms.Waiting + x.Terms.Decode + x.Terms.Transfer + x.Terms.Pressure + x.Terms.Eviction + x.Terms.Others
		if diff := sum - x.Cost; diff > 0.001 || diff < -0.001 {
			t.Errorf("%s: terms sum to %v, cost is %v", x.Rank, sum, x.Cost)
		}
		if x.Rank == "w3/0" && x.Terms.Queue != 70 {
			t.Errorf("700 tokens reserved cost %v ms", x.Terms.Queue)
		}
		if x.Rank == "w0/0" && !x.Excluded {
			t.Error("w0 is not shown as excluded")
		}
	}
	if _, ok := s.Explain("b"); ok {
		t.Error("an unknown id has a record")
	}
}

func TestExplainManyCandidatesKeepsTheBestAndTheChosen(t *testing.T) {
	rs := ranks(500)
	s := New(testOptions)
	for i, r := range rs {
		addLoad(s, r, (i*7919)%500*10+10)
	}
	for turn := range 3 { // first sight, then on the board
		id := fmt.Sprint("a", turn)
		c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 10, RequestID: id, Attempt: 1})
		d := decode(t, s, id).Decisions[0]
		if d.Candidates != 500 || len(d.Shown) > maxBestRecorded || len(d.Shown) < maxShownBlocks || d.Chosen != c.Rank.ID.String() || c.Rank != rs[0] {
			t.Fatalf("turn %d: %d shown of %d, chosen %q", turn, len(d.Shown), d.Candidates, d.Chosen)
		}
		for _, x := range d.Shown {
			if x.Reserved > 1000 { // the least of 32 drawn from 10 … 5000
				t.Errorf("turn %d: %s with %d tokens is the best of nothing", turn, x.Rank, x.Reserved)
			}
		}
		c.Reservation.Release()
	}
}

func TestDuplicateIDsNewestFirst(t *testing.T) {
	rs := ranks(2)
	s := New(testOptions)
	for i := range 3 {
		s.Choose(&Query{Candidates: rs, PromptTokens: 100 + i, RequestID: "same", Attempt: 1})
		if i == 0 {
			s.EndRecord("same", Outcome{Status: 200}) // ended, then again; the third overlaps the second
		}
	}
	r := decode(t, s, "same")
	if len(r.Earlier) != 2 || r.Decisions[0].PromptTokens != 102 || r.Earlier[1].Decisions[0].PromptTokens != 100 || r.Earlier[1].Outcome == nil {
		t.Errorf("got %+v", r)
	}
}

// A retry with the same handle, and a choice made again after a wait for a
// rank, belong to the request they are of.
func TestRetriesStayInOneRecord(t *testing.T) {
	rs := ranks(2)
	s := New(testOptions)
	s.Choose(&Query{Leg: DecodeLeg, RequestID: "a", Attempt: 1})
	c, _ := s.Choose(&Query{Leg: DecodeLeg, Candidates: rs, RequestID: "a", Attempt: 1})
	s.Choose(&Query{Leg: DecodeLeg, Candidates: rs, Excluded: []*worker.Rank{c.Rank}, RequestID: "a", Attempt: 1})
	if r := decode(t, s, "a"); len(r.Decisions) != 3 || len(r.Earlier) != 0 || r.Decisions[0].Chosen != "" || r.Decisions[2].Excluded != 1 {
		t.Errorf("got %+v", r)
	}
}

func TestRecordsAreTheLastN(t *testing.T) {
	rs := ranks(2)
	opt := testOptions
	opt.Explain = 100
	s := New(opt)
	for i := range 1000 {
		id := fmt.Sprint("r", i)
		s.Choose(&Query{Candidates: rs, RequestID: id, Attempt: 1})
		for range 40 {
			s.AddNote(id, strings.Repeat("é", 400))
		}
		s.EndRecord(id, Outcome{Status: 200})
	}
	for i := range 1000 {
		if _, ok := s.Explain(fmt.Sprint("r", i)); ok != (i >= 900) {
			t.Fatalf("r%d known: %v", i, ok)
		}
	}
	cached := 0
	for i := range s.records.buckets {
		for k := range s.records.buckets[i] {
			if s.records.buckets[i][k].Load() != 0 {
				cached++
			}
		}
	}
	if room := 8 * len(s.records.buckets); room < 400 || room > 800 || cached < 100 {
		t.Errorf("the table has %d cells for 100 records, %d of them used", room, cached)
	}
	r := decode(t, s, "r999")
	if len(r.Notes) != maxNotes || r.LostNotes != 40-maxNotes || len(r.Notes[0].Text) > maxNoteBytes+3 {
		t.Errorf("notes are not bounded: %d kept, %d lost", len(r.Notes), r.LostNotes)
	}
	rec := s.Recent(5)
	if len(rec) != 5 || rec[0].RequestID != "r999" || rec[4].RequestID != "r995" {
		t.Errorf("recent: %+v", rec)
	}
	if len(s.Recent(1000)) != 100 {
		t.Error("recent is not bounded by the ring")
	}
	opt.Explain = -1
	off := New(opt)
	off.Choose(&Query{Candidates: rs, RequestID: "x"})
	off.AddNote("x", "y")
	off.EndRecord("x", Outcome{})
	if _, ok := off.Explain("x"); ok || off.Recent(1) != nil || off.RecordCapacity() != 0 {
		t.Error("records were kept although they are off")
	}
}

func TestRecordsUnderConcurrency(t *testing.T) {
	rs := ranks(8)
	opt := testOptions
	opt.Explain = 16 // the ring turns over all the time
	s := New(opt)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 500 {
				id := fmt.Sprint(i % 40)
				c, _ := s.Choose(&Query{Candidates: rs, RequestID: id, Attempt: 1 + i%2})
				s.AddNote(id, "n")
				if b, ok := s.Explain(id); ok && !json.Valid(b) {
					t.Error("not JSON")
				}
				s.EndRecord(id, Outcome{Status: 200})
				if g == 0 {
					s.Recent(20)
				}
				c.Reservation.Release()
			}
		})
	}
	wg.Wait()
	mustZero(t, rs)
}

func TestWatch(t *testing.T) {
	rs := ranks(1)
	s := New(testOptions)
	var got []string
	s.SetObserver(func(e *Event) { got = append(got, e.Kind+" "+e.RequestID) })
	s.Choose(&Query{Candidates: rs, RequestID: "a", Attempt: 1})
	s.Choose(&Query{RequestID: "a", Attempt: 2})
	s.EndRecord("a", Outcome{})
	s.SetObserver(nil)
	s.Choose(&Query{Candidates: rs, RequestID: "b", Attempt: 1})
	if want := "[chosen a refused a ended a]"; fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
}

func TestChooseAllocates(t *testing.T) {
	if raceEnabled {
		t.Skip("sync.Pool drops what it is given at random under the race detector")
	}
	rs := ranks(1000)
	opt := testOptions
	opt.Explain = 64
	s := New(opt)
	q := &Query{Candidates: rs, PromptTokens: 1000, Attempt: 1}
	ids := make([]string, 512)
	for i := range ids {
		ids[i] = fmt.Sprint("id-", i)
	}
	i := 0
	one := func() {
		q.RequestID = ids[i%len(ids)]
		i++
		c, _ := s.Choose(q)
		s.EndRecord(q.RequestID, Outcome{Status: 200})
		c.Reservation.Release()
	}
	for range 2000 {
		one()
	}
	// The Reservation, and now and then the pool or a map's growth.
	if n := testing.AllocsPerRun(2000, one); n > 1 {
		t.Errorf("%v allocations a choice, want 1", n)
	}
}
