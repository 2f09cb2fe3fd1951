// Package admission tests the queue of requests that no rank can start soon, in a whole router over
// simulated engines.
package admission

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// slowPrefill makes an engine compute one prompt of promptTokens after the other, each in about
// promptTime.
func slowPrefill(o *sim.Options) {
	o.Cost.PerPrefill, o.Cost.Step, o.MaxBatch = 100*time.Microsecond, 2*time.Millisecond, 1024
	o.NoPrefixCache, o.Speed = true, 1
}

const (
	promptWords = 480 // about a thousand tokens
	promptTime  = 100 * time.Millisecond
)

// streamed is the end of one streamed request.
type streamed struct {
	status int
	reason string
	ttft   time.Duration // 0: no token came
	header http.Header
	class  string
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}

// stream sends one streamed request with a prompt of promptWords and reads its response.
func stream(ctx context.Context, url string, salt int, headers ...string) (s streamed, err error) {
	return streamWords(ctx, url, promptWords, salt, headers...)
}

// streamWords is stream with a prompt of that many words.
func streamWords(ctx context.Context, url string, words, salt int, headers ...string) (s streamed, err error) {
	body := fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":2,"messages":[{"role":"user","content":%q}]}`, harness.PromptWords(words, salt))
	req, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return s, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return s, err
	}
	defer resp.Body.Close()
	s.status, s.reason, s.header = resp.StatusCode, resp.Header.Get("X-Sluice-Reason"), resp.Header
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if s.ttft == 0 && strings.HasPrefix(lines.Text(), "data: {") && resp.StatusCode == 200 {
			s.ttft = time.Since(began)
		}
	}
	return s, nil
}

// offer sends requests at a mean rate for a time, at random intervals, and returns their ends. headers
// returns the headers of request i.
func offer(t *testing.T, url string, perSecond float64, duration time.Duration, headers func(i int) []string) []streamed {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	var all []streamed
	var wg sync.WaitGroup
	began := time.Now()
	for i, at := 0, time.Duration(0); at < duration; i++ {
		testwait.Pace(time.Until(began.Add(at)))
		wg.Go(func() {
			s, err := stream(context.Background(), url, i, headers(i)...)
			if err != nil {
				t.Error(err)
				return
			}
			if h := headers(i); len(h) > 1 {
				s.class = h[1]
			}
			mu.Lock()
			all = append(all, s)
			mu.Unlock()
		})
		at += time.Duration(rng.ExpFloat64() / perSecond * float64(time.Second))
	}
	wg.Wait()
	return all
}

func goodput(all []streamed, target time.Duration, is func(*streamed) bool) (met, refused, late int) {
	for i := range all {
		switch s := &all[i]; {
		case !is(s):
		case s.status != 200:
			refused++
		case s.ttft > 0 && s.ttft <= target:
			met++
		default:
			late++
		}
	}
	return met, refused, late
}

func anyOf(*streamed) bool { return true }

// TestGoodputUnderOverload offers three times what the engines can do. With the queue, more requests
// meet their target than without: the queue refuses those that cannot, instead of delaying all.
func TestGoodputUnderOverload(t *testing.T) {
	const target = 1500 * time.Millisecond
	headers := func(int) []string { return []string{"x-llm-d-slo-ttft-ms", fmt.Sprint(target.Milliseconds())} }
	met := map[string]int{}
	for _, mode := range []string{"off", "fair"} {
		a, b := harness.StartSim(t, slowPrefill), harness.StartSim(t, slowPrefill)
		r := harness.StartRouter(t, func(c *config.Config) { c.Admission.Mode = mode }, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
		all := offer(t, r.URL, 60, 5*time.Second, headers)
		n, refused, late := goodput(all, target, anyOf)
		met[mode] = n
		t.Logf("%s: %d requests, %d met the target, %d refused, %d too late", mode, len(all), n, refused, late)
		for _, s := range all {
			if s.status != 200 && (s.status != 429 || s.reason != "target_unmet" && s.reason != "admission_timeout" || s.header.Get("Retry-After") == "") {
				t.Errorf("%s: status %d, reason %q, Retry-After %q", mode, s.status, s.reason, s.header.Get("Retry-After"))
				break
			}
		}
		harness.WantIdle(t, r, 20*time.Second, a, b)
		if n := r.Metric(`sluice_admission_waiting_requests{class="default"}`); n != 0 {
			t.Errorf("%v requests wait after the load", n)
		}
	}
	if met["fair"] < met["off"]*3/2 {
		t.Errorf("%d requests met their target with the queue, %d without; want at least half as many again", met["fair"], met["off"])
	}
}

// twoClasses are the classes interactive and batch, which trusted clients select.
func twoClasses(c *config.Config) {
	c.Admission.Trusted = []string{"any"}
	c.Admission.Classes = []config.AdmissionClass{{Name: "interactive"}, {Name: "batch"}}
	c.Admission.DefaultClass, c.Admission.MinShare = "batch", 0
}

// TestTargetDespiteLongPrompts: short requests of the highest class with a target are served although a lower
// class has a backlog of prompts that take longer than the target.
func TestTargetDespiteLongPrompts(t *testing.T) {
	const long, shortWords = 7, 10 // a long prompt is as long as 7 of promptWords
	e := harness.StartSim(t, slowPrefill)
	r := harness.StartRouter(t, twoClasses, harness.SimWorker(e, worker.Aggregated, "a"))
	ctx, stop := context.WithCancel(context.Background())
	var batch sync.WaitGroup
	defer batch.Wait()
	defer stop()
	ends := make(chan time.Time, 1000)
	for i := range 4 {
		batch.Go(func() {
			for salt := i; ctx.Err() == nil; salt += 4 {
				if _, err := streamWords(ctx, r.URL, long*promptWords, salt, "X-Sluice-Priority", "batch"); err == nil {
					ends <- time.Now()
				}
			}
		})
	}
	first := <-ends
	<-ends
	<-ends
	longTime := (<-ends).Sub(first) / 3
	target := longTime // a tenth of it is left unused
	rng, served, refused := rand.New(rand.NewPCG(1, 2)), 0, map[string]int{}
	const requests = 12
	for i := range requests {
		s, err := streamWords(context.Background(), r.URL, shortWords, 1000+i, "X-Sluice-Priority", "interactive", "x-llm-d-slo-ttft-ms", fmt.Sprint(target.Milliseconds()))
		if err != nil {
			t.Fatal(err)
		}
		if s.status == 200 {
			served++
		} else {
			refused[s.reason]++
		}
		testwait.Pace(time.Duration(rng.Int64N(int64(longTime))))
	}
	t.Logf("%d of %d requests of the highest class were served; refused: %v; a long prompt takes %v", served, requests, refused, longTime)
	if served < requests/2 {
		t.Errorf("%d of %d requests of the highest class were served beside a backlog of long prompts of a lower class; refused: %v", served, requests, refused)
	}
}

// TestRetryAfterIsTheForecast: Retry-After of a request that is refused because others go before it is the
// time until these are expected to have started.
func TestRetryAfterIsTheForecast(t *testing.T) {
	e := harness.StartSim(t, slowPrefill)
	r := harness.StartRouter(t, twoClasses, harness.SimWorker(e, worker.Aggregated, "a"))
	var backlog sync.WaitGroup
	defer backlog.Wait()
	const requests = 80
	for i := range requests {
		backlog.Go(func() {
			if s, err := streamWords(context.Background(), r.URL, promptWords, i, "X-Sluice-Priority", "interactive"); err != nil || s.status != 200 {
				t.Errorf("a request without a target: %v, %v", s.status, err)
			}
		})
	}
	testwait.UntilWithin(t, 20*time.Second, "most requests wait, and it is known how fast they start", func() bool {
		n := waiting(r, "interactive")
		return n > requests/2 && n < requests*3/4
	})
	s, err := streamWords(context.Background(), r.URL, promptWords, requests, "X-Sluice-Priority", "batch", "x-llm-d-slo-ttft-ms", "1000")
	if err != nil || s.status != 429 || s.reason != "target_unmet" {
		t.Fatalf("status %d, reason %q, %v; want a refusal for the target", s.status, s.reason, err)
	}
	began := time.Now()
	testwait.UntilWithin(t, time.Minute, "the requests before it have started", func() bool { return waiting(r, "interactive") == 0 })
	took := time.Since(began).Seconds()
	after, err := strconv.Atoi(s.header.Get("Retry-After"))
	t.Logf("Retry-After %d s; the requests before it had started after %.1f s", after, took)
	if float64(after) < took/2-1 || float64(after) > took*2+1 {
		t.Errorf("Retry-After %q, %v; want about %.1f s, after which the requests before it had started", s.header.Get("Retry-After"), err, took)
	}
}

// TestDelayInEngineRefusesNobodyAlone: what the engine took until the first tokens of other requests does not
// refuse one before which no other goes.
func TestDelayInEngineRefusesNobodyAlone(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		twoClasses(c)
		oneAtATime(c)
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	release := hang(e)
	defer release()
	var o clients
	o.send(t, r, "first")
	testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool { return len(harness.GenerateRequests(e)) > 0 })
	o.send(t, r, "second")
	testwait.UntilWithin(t, 20*time.Second, "the second waits", func() bool { return waiting(r, "batch") == 1 })
	for _, k := range r.AllRanks() {
		k.Pace.FirstToken(time.Hour, time.Hour, 0, false, false)
	}
	ends := make(chan streamed, 1)
	go func() {
		s, err := streamWords(context.Background(), r.URL, 10, 1, "X-Sluice-Priority", "interactive", "x-llm-d-slo-ttft-ms", "30000")
		if err != nil {
			t.Error(err)
		}
		ends <- s
	}()
	testwait.UntilWithin(t, 20*time.Second, "the request with a target waits or has ended", func() bool { return waiting(r, "interactive") == 1 || len(ends) > 0 })
	release()
	if s := <-ends; s.status != 200 {
		t.Errorf("a request of the highest class before which none goes was refused: status %d, reason %q", s.status, s.reason)
	}
	if _, refused := o.wait(e); refused != "[]" {
		t.Errorf("requests without a target were refused: %s", refused)
	}
	wantEmpty(t, r, e)
}
