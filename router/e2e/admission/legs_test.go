package admission

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestPromptWaitsForDecode: a request with two legs is not prefilled while no decode rank has capacity.
func TestPromptWaitsForDecode(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, oneAtATime, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	var rank *worker.Rank
	for _, k := range r.AllRanks() {
		if k.ID.Worker == "d0" {
			rank = k
		}
	}
	rank.Requests.Add(1) // of a request that decodes
	var o clients
	o.send(t, r, "waits")
	testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return waiting(r, "default") == 1 })
	testwait.Holds(t, 200*time.Millisecond, "no prompt is computed", func() bool { return len(harness.GenerateRequests(p)) == 0 })
	rank.Requests.Add(-1)
	if served, refused := o.wait(d); served != "[waits]" || refused != "[]" || len(harness.GenerateRequests(p)) != 1 {
		t.Errorf("decode served %s, refused %s, %d prompts; want the request and one prompt", served, refused, len(harness.GenerateRequests(p)))
	}
	wantEmpty(t, r, p, d)
}

// TestStreamThatWaitsIsKeptAlive: with early headers, a stream that waits gets its head and comments.
func TestStreamThatWaitsIsKeptAlive(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		oneAtATime(c)
		c.Relay.EarlyHeadersAfter, c.Relay.CommentInterval = 20*time.Millisecond, 20*time.Millisecond
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	release := hang(e)
	defer release()
	var o clients
	o.send(t, r, "first")
	testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool { return len(harness.GenerateRequests(e)) > 0 })
	req, err := http.NewRequestWithContext(context.Background(), "POST", r.URL+"/v1/chat/completions", strings.NewReader(harness.Chat(`,"stream":true`)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req) // returns with the head
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	comments := 0
	for comments < 3 && lines.Scan() {
		if strings.HasPrefix(lines.Text(), ":") {
			comments++
		}
	}
	if resp.StatusCode != 200 || comments < 3 || waiting(r, "default") != 1 {
		t.Errorf("status %d, %d comments, %d requests wait; want 200, 3 and 1", resp.StatusCode, comments, waiting(r, "default"))
	}
	release()
	done := false
	for lines.Scan() {
		done = done || lines.Text() == "data: [DONE]"
	}
	if !done {
		t.Error("the stream has no end")
	}
	o.wg.Wait()
	wantEmpty(t, r, e)
}

// TestDrainWithWaitingRequests: requests that wait when a drain begins are served.
func TestDrainWithWaitingRequests(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, oneAtATime, harness.SimWorker(e, worker.Aggregated, "a"))
	release := hang(e)
	defer release()
	var o clients
	for _, name := range []string{"a", "b", "c", "d"} {
		o.send(t, r, name)
	}
	testwait.UntilWithin(t, 20*time.Second, "three wait", func() bool { return waiting(r, "default") == 3 })
	r.Stop()
	testwait.UntilWithin(t, 20*time.Second, "the router drains", func() bool { return strings.Contains(r.Logs.String(), "msg=draining") })
	release()
	o.wg.Wait()
	if n := len(harness.GenerateRequests(e)); n != 4 || len(o.refused) > 0 {
		t.Errorf("%d requests were served, refused %v; want all 4", n, o.refused)
	}
}

// TestLostWorkersWithWaitingRequests: when the last worker of a model is lost, its waiting requests are
// refused after pool_wait as one that arrives then; if it returns before, they are served.
func TestLostWorkersWithWaitingRequests(t *testing.T) {
	t.Parallel()
	for _, returns := range []bool{true, false} {
		e := harness.StartSim(t, nil)
		r := harness.StartRouter(t, func(c *config.Config) {
			oneAtATime(c)
			c.Health.Interval, c.Health.Timeout = 20*time.Millisecond, 5*time.Second
			if c.Timeouts.PoolWait = 500 * time.Millisecond; returns {
				c.Timeouts.PoolWait = 30 * time.Second
			}
		}, harness.SimWorker(e, worker.Aggregated, "a"))
		rank := r.AllRanks()[0]
		rank.Requests.Add(1)
		var o clients
		for _, name := range []string{"a", "b", "c"} {
			o.send(t, r, name)
		}
		testwait.UntilWithin(t, 20*time.Second, "all wait", func() bool { return waiting(r, "default") == 3 })
		e.Crash()
		testwait.UntilWithin(t, 20*time.Second, "the worker is lost", func() bool { return r.State("a") != worker.Ready })
		rank.Requests.Add(-1)
		if returns {
			e.Restart()
		}
		o.wg.Wait()
		for _, refused := range o.refused {
			if returns || !strings.Contains(refused, " 503 ") {
				t.Errorf("the worker returns %v: %s", returns, refused)
			}
		}
		if !returns && len(o.refused) != 3 {
			t.Errorf("%v were refused; want all 3", o.refused)
		}
		if returns {
			wantEmpty(t, r, e)
		}
	}
}

// TestLostPrefillWithWaitingRequests: when the last prefill worker is lost, waiting requests with two legs wait
// for capacity of the decode ranks, which run them as a whole, and no longer than max_wait.
func TestLostPrefillWithWaitingRequests(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rankRequests int64 // of decode
		occupy       func(decode *worker.Rank, sign int64)
		expires      bool
	}{
		"at a limit":          {1, func(d *worker.Rank, sign int64) { d.Requests.Add(sign) }, false},
		"prompts are queued":  {0, func(d *worker.Rank, sign int64) { d.PendingWork.Add(sign * int64(time.Minute)) }, false},
		"longer than allowed": {1, func(d *worker.Rank, sign int64) { d.Requests.Add(sign) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
			prefill, decode := harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0")
			prefill.RankRequests, decode.RankRequests = 1, c.rankRequests
			r := harness.StartRouter(t, func(c2 *config.Config) {
				c2.Health.Interval, c2.Health.Timeout = 20*time.Millisecond, 5*time.Second
				if c.expires {
					c2.Admission.MaxWait = time.Second
				}
			}, prefill, decode)
			var full *worker.Rank
			for _, k := range r.AllRanks() {
				if k.ID.Worker == "p0" {
					k.Requests.Add(1) // of a request whose prompt is computed; it ends with the worker
					defer k.Requests.Add(-1)
				} else {
					full = k
				}
			}
			var o clients
			for _, name := range []string{"a", "b", "c"} {
				o.send(t, r, name)
			}
			testwait.UntilWithin(t, 20*time.Second, "all wait", func() bool { return waiting(r, "default") == 3 })
			c.occupy(full, 1)
			p.Crash()
			testwait.UntilWithin(t, 20*time.Second, "the worker is lost", func() bool { return r.State("p0") != worker.Ready })
			if c.expires {
				o.wg.Wait()
				c.occupy(full, -1)
				if got := strings.Join(o.refused, " "); strings.Count(got, "429 admission_timeout") != 3 {
					t.Errorf("refused %s; want all 3 after max_wait", got)
				}
				return
			}
			testwait.Holds(t, 300*time.Millisecond, "all wait for decode", func() bool {
				return waiting(r, "default") == 3 && len(harness.GenerateRequests(d)) == 0 && r.Metric(`sluice_admission_enqueued_total{class="default"}`) == 3
			})
			c.occupy(full, -1)
			o.wg.Wait()
			ids := harness.Ids(harness.GenerateRequests(d))
			slices.Sort(ids)
			if fmt.Sprint(ids) != "[a b c]" || len(o.refused) > 0 {
				t.Errorf("decode served %v, refused %v; want all", ids, o.refused)
			}
		})
	}
}

// TestReloadToNoQueue: after a reload to admission.mode off, requests that wait go on as those that arrive then.
func TestReloadToNoQueue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ limits, served, refused string }{
		"prompts are queued": {"", "[a b c]", "[]"},
		"at a limit":         {", rank_requests: 1", "[]", "[a 429 pool_overloaded b 429 pool_overloaded c 429 pool_overloaded]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := harness.StartSim(t, nil)
			path := filepath.Join(t.TempDir(), "sluice.yaml")
			write := func(mode string) {
				harness.WriteFile(t, path, fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: off}\nworkers:\n  - {id: a, url: %s%s}\nadmission: {mode: %q}\n", e.URL(), c.limits, mode))
			}
			write("fair")
			r := harness.LaunchConfigured(t, path)
			r.AwaitReady(t)
			rank := r.AllRanks()[0]
			rank.PendingWork.Add(int64(time.Minute))
			defer rank.PendingWork.Add(-int64(time.Minute))
			rank.Requests.Add(1)
			defer rank.Requests.Add(-1)
			var o clients
			for _, name := range []string{"a", "b", "c"} {
				o.send(t, r, name)
			}
			testwait.UntilWithin(t, 20*time.Second, "all wait", func() bool { return waiting(r, "default") == 3 })
			write("off")
			if _, err := r.Reload(context.Background(), false); err != nil {
				t.Fatal(err)
			}
			o.wg.Wait()
			served := harness.Ids(harness.GenerateRequests(e))
			slices.Sort(served)
			slices.Sort(o.refused)
			if fmt.Sprint(served) != c.served || fmt.Sprint(o.refused) != c.refused {
				t.Errorf("served %v, refused %v; want %s and %s", served, o.refused, c.served, c.refused)
			}
			if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "later"); c.limits == "" && a.Status != 200 {
				t.Errorf("a later request has the status %d", a.Status)
			}
			write("fair")
			if _, err := r.Reload(context.Background(), false); err != nil {
				t.Fatal(err)
			}
			o.send(t, r, "waits again")
			testwait.UntilWithin(t, 20*time.Second, "one waits again", func() bool { return waiting(r, "default") == 1 })
			rank.PendingWork.Add(-int64(time.Minute))
			rank.Requests.Add(-1)
			o.wg.Wait()
			rank.PendingWork.Add(int64(time.Minute))
			rank.Requests.Add(1)
		})
	}
}
