package pd

import (
	"testing"
	"testing/synctest"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/config"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// cancelled says which legs of a pair are cancelled at a time after the client has disconnected.
type cancelled struct{ prefill, decode bool }

// TestClientGoneCancelsLegs carries out the abort rule of each family's legs in every phase: which calls
// are cancelled at once, before the lease ends while prefill still runs, and at the end.
func TestClientGoneCancelsLegs(t *testing.T) {
	neither, prefill, decode, both := cancelled{}, cancelled{prefill: true}, cancelled{decode: true}, cancelled{true, true}
	type times struct{ atOnce, whilePrefillRuns, atEnd cancelled }
	never := times{neither, neither, neither}
	type row [abort.PhaseStream + 1]times // by phase
	unleased := row{{prefill, prefill, prefill}, never, {decode, decode, decode}, {decode, decode, decode}, never}
	leased := row{{neither, prefill, prefill}, never, {neither, neither, decode}, {decode, decode, decode}, never}
	room := row{abort.PhaseDecode: {both, both, both}, abort.PhaseAnswer: {both, both, both}}
	transfer := row{abort.PhaseDecode: {prefill, prefill, both}, abort.PhaseAnswer: {prefill, prefill, both}}
	legs := []struct {
		family     string
		concurrent bool
		want       row
	}{
		{"nixl", false, leased}, {"trtllm", false, leased},
		{"nixl-push", false, leased}, {"nixl-push", true, transfer},
		{"mooncake", false, leased}, {"mooncake", true, transfer},
		{"sglang", false, unleased}, {"sglang", true, room},
		{"lmcache", false, unleased}, {"storage", false, unleased}, {"orchestrated", false, unleased},
	}
	for _, name := range family.Names() {
		ordered := map[bool]bool{} // by concurrent
		for _, k := range legs {
			if k.family == name {
				ordered[k.concurrent] = true
			}
		}
		f, err := family.ByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if may := mayRunAtOnce(f); !ordered[false] || ordered[true] != may {
			t.Errorf("family %s has the rows %v (by concurrent); want one for each order of its legs (concurrent: %v)", name, ordered, may)
		}
	}
	for _, k := range legs {
		f, err := family.ByName(k.family)
		if err != nil {
			t.Fatal(err)
		}
		for phase := range abort.PhaseStream + 1 {
			synctest.Test(t, func(t *testing.T) {
				const lease, prefillRuns = 10 * time.Second, 3 * time.Second
				r := &Runner{answerDeadlines: abort.NewDeadlines()}
				q := &request{runState: runState{r: r, settings: &settings{r: r, Options: Options{Observer: nopObserver{}}}}}
				q.stream, q.pd, q.plan.Traits = true, &config.PD{Lease: lease}, f.Traits()
				if phase > abort.PhasePrefill {
					q.handover.Handle = []byte("{}")
				}
				choice := &schedule.Choice{Rank: &worker.Rank{Worker: worker.New(worker.Spec{ID: "w"})}}
				prefillCall, decodeCall := q.startPrefill(choice).call, q.startDecode(schedule.DecodeLeg, choice, nil).call
				q.prefillLeg.handleAt = time.Now()
				if k.concurrent {
					q.concurrent = r.newConcurrentPrefill()
					q.concurrent.done.Add(1)
					time.AfterFunc(prefillRuns, q.concurrent.done.Done)
					prefillCall, decodeCall = &q.concurrent.call, &q.concurrent.decode
					q.startDecode(schedule.DecodeLeg, choice, decodeCall)
				}
				if goneFunc := q.cancelFunc(phase); goneFunc != nil {
					goneFunc()
				}
				now := func() cancelled { return cancelled{prefillCall.Cancelled(), decodeCall.Cancelled()} }
				var got times
				got.atOnce = now()
				time.Sleep(prefillRuns - time.Millisecond)
				got.whilePrefillRuns = now()
				time.Sleep(lease + time.Second)
				got.atEnd = now()
				if got != k.want[phase] {
					t.Errorf("%s, concurrent %v, phase %d: cancelled %+v, want %+v", k.family, k.concurrent, phase, got, k.want[phase])
				}
			})
		}
	}
}

// mayRunAtOnce reports whether a family runs both legs at once where all that it asks for is known.
func mayRunAtOnce(f family.Family) bool {
	w := worker.New(worker.Spec{ID: "w", Options: map[string][]string{"bootstrap_port": {"8998"}}})
	return f.Order(&family.Handover{Kind: front.Chat, PeerInfo: "{}", Prefill: &worker.Rank{Worker: w}}) == family.Concurrent
}

// nopObserver counts nothing.
type nopObserver struct{ Observer }

func (nopObserver) LegStarted(schedule.LegKind, worker.ID) {}

// TestLegsKeepTheirMemory checks that the legs of a request use their Call and abort again after a leg
// that nothing else can cancel, and never after one that something can.
func TestLegsKeepTheirMemory(t *testing.T) {
	r := new(Runner)
	q := &request{runState: runState{r: r, settings: &settings{r: r, Options: Options{Observer: nopObserver{}}}}}
	choice := &schedule.Choice{Rank: &worker.Rank{Worker: worker.New(worker.Spec{ID: "w"})}}
	serve := func() (prefill *prefillLeg, decode *decodeLeg) {
		prefill, decode = q.startPrefill(choice), q.startDecode(schedule.DecodeLeg, choice, nil)
		prefill.armAbort()
		decode.armAbort(&abort.DecodeLeg{Call: decode.call})
		return prefill, decode
	}
	end := func() {
		q.prefillLeg.abandon()
		q.scratch.reset()
	}
	serve()
	end()
	if n := testing.AllocsPerRun(100, func() { serve(); end() }); n != 0 {
		t.Errorf("%v allocations per request", n)
	}
	prefill, decode := serve()
	first, second := prefill.call, decode.call
	prefill.call.Cancel()
	decode.takeForStream(200)
	end()
	if prefill, decode = serve(); prefill.call == first || decode.call == second {
		t.Error("a cancelled call or that of a stream serves another leg")
	}
	second = decode.call
	q.startDecode(schedule.DecodeLeg, choice, new(upstream.Call)).shareCall() // of concurrent legs
	end()
	if _, decode = serve(); decode.call != second {
		t.Error("concurrent legs made the request drop its own call")
	}
}
