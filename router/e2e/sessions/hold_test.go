package sessions

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/session"
	"sluice/router/worker"
)

// fullMeter reports ranks that compute all the time, and whose KV is full.
type fullMeter struct{}

func (fullMeter) Capacity() session.Capacity {
	return session.Capacity{Tokens: 10_000, Occupancy: 1, PerToken: time.Second, Ranks: 1}
}

// limitSessions makes a model limited, by the turns of other sessions that lose their KV. They are active
// then, and leave no space.
func limitSessions(t *testing.T, r *harness.Router, model string) (sessions []session.Key) {
	t.Helper()
	table := r.Runner.Sessions()
	const tokens = 4096
	testwait.Until(t, "the model is limited", func() bool {
		for i := range 16 {
			key := table.KeyOf("", fmt.Append(nil, "other", i))
			u := table.Begin(key, "", session.SluiceSession, false)
			if w := table.Start(&u, session.Request{Pool: model, Tokens: tokens, CannotWait: true, Meter: fullMeter{}}); w != nil {
				t.Fatal("it waits")
			}
			blocks := blocksOf(i, tokens/16)
			table.Observe(&u, blocks, 16, tokens, false)
			table.End(&u, session.Result{OK: true, Cached: 0, Prompt: tokens})
			sessions = append(sessions, key)
		}
		return table.Stats().Limited == 1
	})
	return sessions
}

func blocksOf(session, n int) (blocks []blockhash.Seq) {
	for i := range n {
		blocks = append(blocks, blockhash.Seq(session*1_000_000+i+1))
	}
	return blocks
}

func holds(r *harness.Router) int { return r.Runner.Admission().Classes()[0].OnHold }

// TestTurnsWaitInTheQueue: a request whose session has no place among the active ones is in the admission
// queue, with its bounds, metrics and ends, and delays no other.
func TestTurnsWaitInTheQueue(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Sessions.LimitActive, c.Sessions.Hold, c.Sessions.MaxWait = true, time.Hour, time.Minute
		c.Admission.Classes = []config.AdmissionClass{{Name: "default", MaxRequests: 2, MaxWait: time.Hour}, {Name: "brief", MaxWait: 400 * time.Millisecond}}
		c.Admission.Trusted = []string{"any"}
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	url := r.URL + "/v1/chat/completions"
	harness.WantStatus(t, harness.Post(t, url, harness.Chat("")), 200)
	others := limitSessions(t, r, "sim")
	turn := func(name string) string { return harness.Chat(`,"prompt_cache_key":"` + name + `"`) }

	var left []time.Duration
	for range 5 {
		c := harness.StartRequest(t, r, "leaves", turn("leaves"))
		testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return holds(r) == 1 })
		at := c.Disconnect()
		testwait.UntilWithin(t, 20*time.Second, "it has left the queue", func() bool { return holds(r) == 0 })
		left = append(left, time.Since(at))
	}
	if m := testwait.Median(left...); m > 100*time.Millisecond {
		t.Errorf("a client that disconnected left the queue after %v (%v); want at most 100ms", m, left)
	}

	got := make(chan *harness.Answer, 2)
	for _, name := range []string{"first", "second"} {
		go func() {
			a, err := harness.TryPost(context.Background(), url, turn(name), "X-Request-Id", name)
			if err != nil {
				t.Error(err)
			}
			got <- a
		}()
	}
	testwait.UntilWithin(t, 20*time.Second, "two wait", func() bool { return holds(r) == 2 })
	if n := r.Metric(`sluice_admission_waiting_requests{class="default"}`); n != 2 {
		t.Errorf("%v requests wait in the queue, want 2", n)
	}
	harness.WantReason(t, harness.Post(t, url, turn("third")), 429, "admission_queue_full")
	harness.WantStatus(t, harness.Post(t, url, harness.Chat("")), 200) // no session
	brief := harness.Post(t, url, turn("brief"), "X-Sluice-Priority", "brief")
	if harness.WantStatus(t, brief, 200); brief.Header.Get("X-Sluice-Queue-Time") == "" {
		t.Error("no X-Sluice-Queue-Time")
	}
	if n := r.Metric(`sluice_session_waits_total{outcome="overran"}`); n != 1 {
		t.Errorf("%v turns have waited for half of their class's longest wait, want 1", n)
	}
	for _, key := range others {
		r.Runner.Sessions().Finish(key)
	}
	for range 2 {
		a := <-got
		harness.WantStatus(t, a, 200)
		if notes := fmt.Sprint(r.Outcome(t, a.Header.Get("X-Request-Id")).Notes); !strings.Contains(notes, "for a place among the active sessions: started") || !strings.Contains(notes, "admission: waited") {
			t.Errorf("explain record: %s", notes)
		}
	}
	if n := r.Metric(`sluice_admission_ended_total{class="default",outcome="dispatched"}`); n != 2 {
		t.Errorf("%v requests were dispatched from the queue, want 2", n)
	}
	harness.WantIdle(t, r, 10*time.Second, e)
}

// TestDrainWithTurnsThatWait: in a drain, sessions need no places any more.
func TestDrainWithTurnsThatWait(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Sessions.LimitActive, c.Sessions.Hold, c.Sessions.MaxWait = true, time.Hour, time.Hour
		c.Admission.MaxWait = 10 * time.Hour
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	limitSessions(t, r, "sim")
	got := make(chan *harness.Answer, 1)
	go func() {
		a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.Chat(`,"prompt_cache_key":"turn"`))
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return holds(r) == 1 })
	r.Stop()
	harness.WantStatus(t, <-got, 200)
}
