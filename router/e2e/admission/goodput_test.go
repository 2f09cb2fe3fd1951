// Package admission tests the queue of requests that no rank can start soon, in a whole router over
// simulated engines.
package admission

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
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

// stream sends one streamed request and reads its response.
func stream(ctx context.Context, url string, salt int, headers ...string) (s streamed, err error) {
	body := fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":2,"messages":[{"role":"user","content":%q}]}`, harness.PromptWords(promptWords, salt))
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
