package restart

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// queued returns how many requests wait in the router whose runtime file is in dir, and how many of them are on
// hold.
func queued(t *testing.T, dir string) (requests, onHold int) {
	t.Helper()
	rt := harness.RuntimeOf(t, dir)
	a := harness.Get(t, "http://"+rt.Address+"/admin/v1/queues", "Authorization", "Bearer "+rt.Token)
	var v struct {
		Classes []struct {
			Requests int
			OnHold   int `json:"on_hold"`
		}
	}
	if err := json.Unmarshal(a.Body, &v); err != nil || a.Status != 200 || len(v.Classes) == 0 {
		t.Fatalf("status %d: %s", a.Status, a.Body)
	}
	for _, c := range v.Classes {
		requests, onHold = requests+c.Requests, onHold+c.OnHold
	}
	return requests, onHold
}

// TestRestartWithTurnsOnHold replaces the process while the limit of active sessions keeps turns on hold. The
// replaced process serves these turns at once, because its places are of no use any more. Each is answered once,
// and the process that takes over starts without a limit and with nothing waiting.
func TestRestartWithTurnsOnHold(t *testing.T) {
	t.Parallel()
	const sessions, promptTokens = 8, 600
	e := harness.StartSim(t, func(o *sim.Options) { // its KV holds three of the prompts
		o.Speed, o.Blocks, o.Cost = 1, 129, sim.Cost{Step: time.Millisecond, PerPrefill: 120 * time.Microsecond}
	})
	// The rate is higher than the engine's, so that the router takes it to be busy on any machine.
	r := startRestartingRouter(t, "--engine", e.URL(), "--drain", "60s", "--set", "admission.max_wait=10h", "--set", "schedule.prefill_ms=1",
		"--set", "sessions.limit_active=true", "--set", "sessions.hold=1h", "--set", "sessions.max_wait=1h")
	url := "http://" + r.Addr + "/v1/completions"
	turn := func(session int, id string) error {
		prompt, _ := json.Marshal(harness.TokenIDs(promptTokens, session)) // json.Marshal never fails for numbers
		a, err := harness.TryPost(context.Background(), url, fmt.Sprintf(`{"model":"sim","prompt":%s,"max_tokens":2,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`, prompt),
			"X-Request-Id", id, "X-Sluice-Session", fmt.Sprint("session", session))
		switch {
		case err != nil:
			return err
		case a.Status != 200 || !strings.HasSuffix(string(a.Body), "data: [DONE]\n\n") || strings.Contains(string(a.Body), `"error"`):
			return fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		return nil
	}

	// The sessions evict each other's KV until most of them have no place.
	var enough atomic.Bool
	var inProgress sync.Map // ids
	var work sync.WaitGroup
	var ended atomic.Int64
	var failure atomic.Pointer[string] // the first
	for i := range sessions {
		work.Go(func() {
			defer ended.Add(1)
			for n := 0; !enough.Load(); n++ {
				id := fmt.Sprintf("turn-%d-%d", i, n)
				inProgress.Store(id, true)
				if err := turn(i, id); err != nil {
					text := fmt.Sprintf("%s: %v", id, err)
					failure.CompareAndSwap(nil, &text)
					return
				}
				inProgress.Delete(id)
			}
		})
	}
	testwait.UntilWithin(t, 60*time.Second, "turns are on hold", func() bool {
		_, n := queued(t, r.dir)
		return n >= sessions/2
	})
	enough.Store(true)
	held := 0
	testwait.UntilWithin(t, 60*time.Second, "nothing is in progress but turns on hold", func() bool {
		var requests int
		requests, held = queued(t, r.dir)
		return requests == held && int(ended.Load())+held == sessions
	})
	var want []string
	inProgress.Range(func(id, _ any) bool { want = append(want, id.(string)); return true })
	e.ForgetRequests()

	replaced := r.restart(t)
	harness.DropIdle()
	testwait.UntilWithin(t, 60*time.Second, "all turns are answered", func() bool { return ended.Load() == sessions })
	work.Wait()
	replaced()
	if text := failure.Load(); text != nil {
		t.Error(*text)
	}
	got := harness.Ids(harness.GenerateRequests(e))
	slices.Sort(want)
	slices.Sort(got)
	if held < sessions/2 || !slices.Equal(got, want) {
		t.Errorf("%d turns were on hold; the engine received %v, want %v", held, got, want)
	}

	harness.DropIdle()
	for i := range sessions {
		if err := turn(i, fmt.Sprint("next-", i)); err != nil {
			t.Errorf("the next turn of session %d: %v", i, err)
		}
	}
	if requests, onHold := queued(t, r.dir); requests != 0 || onHold != 0 {
		t.Errorf("%d requests wait in the new process, %d of them on hold; want none", requests, onHold)
	}
	gauges := func() (all, notZero []string) {
		for line := range strings.Lines(string(harness.Get(t, "http://"+r.Addr+"/metrics").Body)) {
			for _, gauge := range []string{"sluice_session_turns_waiting", "sluice_sessions_limited_models", "sluice_admission_waiting_", "sluice_pool_waiters", "sluice_legs_in_flight", "sluice_rank_requests"} {
				if strings.HasPrefix(line, gauge) {
					if all = append(all, gauge); !strings.HasSuffix(strings.TrimSpace(line), " 0") {
						notZero = append(notZero, line)
					}
				}
			}
		}
		return all, notZero
	}
	testwait.Until(t, "all counts of the new process are zero", func() bool {
		all, notZero := gauges()
		return len(all) >= 6 && len(notZero) == 0
	})
	testwait.Until(t, "the engine is idle", func() bool { s := e.Stats().Sum(); return s.Running == 0 && s.Waiting == 0 })
}
