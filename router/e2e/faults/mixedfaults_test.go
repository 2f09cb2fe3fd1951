package faults

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestMixedFaults is point 18 of RELIABILITY.md: engines fail in every way and clients leave, for
// the time of harness.SoakTime. The router's process must not gain goroutines or descriptors after
// the warm-up, nor memory between the first and the last quarter.
func TestMixedFaults(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("processes, some seconds long")
	}
	span, long := harness.SoakTime(time.Hour)
	warmUp := min(5*time.Minute, span/3)
	if !long {
		warmUp, span = 4*time.Second, 6*time.Second
	}
	var engines []*sim.Engine
	// Explain records are in a ring whose slots grow to the largest record written to them. With
	// the default of 10,000 slots memory would still grow after 100,000 requests.
	args := []string{"serve", "--listen", "127.0.0.1:0", "--admin", "off", "--set", "timeouts.stream_idle=2s", "--set", "timeouts.first_byte=2s", "--set", "pd.lease=5s", "--set", "schedule.explain=100"}
	for i := range 5 {
		kind := "decode"
		if i%2 == 0 {
			kind = "prefill"
		}
		e := harness.StartSim(t, harness.SimRole(kind))
		engines = append(engines, e)
		args = append(args, "--"+kind, e.URL())
	}
	env, _ := harness.ServeEnv(t)
	p := harness.Launch(t, env, args...)
	p.Ready(t)
	faults := []sim.Fault{
		{Kind: sim.Status, P: 0.03}, {Kind: sim.Status, Status: 500, P: 0.02}, {Kind: sim.Stall, Delay: 3 * time.Second, P: 0.01}, {Kind: sim.Stall, After: 2, Delay: 3 * time.Second, P: 0.01},
		{Kind: sim.Reset, P: 0.02}, {Kind: sim.Reset, After: 3, P: 0.02}, {Kind: sim.Truncate, After: 2, P: 0.02}, {Kind: sim.StreamFail, After: 1, P: 0.02},
		{Kind: sim.Malformed, P: 0.02}, {Kind: sim.BadHandle, P: 0.02}, {Kind: sim.NoHandle, P: 0.02}, {Kind: sim.Slow, Delay: 5 * time.Millisecond, P: 0.2},
	}
	var asked, remaining atomic.Int64
	var outcome [6]atomic.Int64
	var took [2]latencies // of successful requests, in the first and the last quarter
	traffic := func(span time.Duration) {
		for _, e := range engines {
			for _, f := range faults {
				e.Fault(f)
			}
		}
		var clients sync.WaitGroup
		began := time.Now()
		end := began.Add(span)
		for range 8 {
			clients.Go(func() {
				c := &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{}}
				defer c.CloseIdleConnections()
				for time.Now().Before(end) {
					ctx, cancel := context.WithCancel(context.Background())
					if rand.IntN(5) == 0 {
						remaining.Add(1)
						time.AfterFunc(time.Duration(rand.IntN(20_000))*time.Microsecond, cancel)
					}
					body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%s %d"}],"max_tokens":%d,"ignore_eos":true,"stream":%t}`, harness.Prompt, rand.IntN(50), 1+rand.IntN(30), rand.IntN(2) == 0)
					req, _ := http.NewRequestWithContext(ctx, "POST", "http://"+p.Addr+"/v1/chat/completions", strings.NewReader(body))
					req.Header.Set("Content-Type", "application/json")
					asked.Add(1)
					sent := time.Now()
					if resp, err := c.Do(req); err == nil {
						_, err = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
						outcome[min(resp.StatusCode/100, 5)].Add(1)
						switch part := 4 * sent.Sub(began) / span; {
						case err != nil || resp.StatusCode != 200:
						case part == 0:
							took[0].add(time.Since(sent))
						case part == 3:
							took[1].add(time.Since(sent))
						}
					}
					cancel()
				}
			})
		}
		clients.Wait()
		for _, e := range engines {
			e.ClearFaults()
		}
	}
	resident := func() (kB float64) {
		status, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.Cmd.Process.Pid), "status"))
		_, after, _ := strings.Cut(string(status), "VmRSS:")
		n, _ := strconv.Atoi(strings.Fields(after)[0])
		return float64(n)
	}
	type state struct{ goroutines, files int }
	measure := func() (s state) {
		harness.DropIdle()
		page := string(harness.Get(t, "http://"+p.Addr+"/metrics").Body)
		s.goroutines = int(harness.SeriesValue(page, "go_goroutines"))
		all, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Cmd.Process.Pid))
		s.files = len(all)
		return s
	}
	traffic(warmUp)
	var first state
	testwait.UntilWithin(t, 60*time.Second, "nothing is in flight", func() bool {
		page := string(harness.Get(t, "http://"+p.Addr+"/metrics").Body)
		return harness.SeriesValue(page, "sluice_rank_requests{") == 0 && harness.SeriesValue(page, "sluice_legs_in_flight{") == 0 && harness.SeriesValue(page, "sluice_kv_handles_leased") == 0
	})
	time.Sleep(6 * time.Second) // until idle engine connections are closed and leases have ended
	first = measure()
	asked.Store(0)
	remaining.Store(0)
	for i := range outcome {
		outcome[i].Store(0)
	}
	took[0], took[1] = latencies{}, latencies{}
	// Memory is compared under traffic, as means over a quarter of the time. At rest it depends on
	// the last garbage collection and varies by a tenth.
	memory := sampleQuarters(span, time.Second, resident)
	traffic(span)
	before, after := memory()
	var last state
	testwait.UntilWithin(t, 60*time.Second, "goroutines and descriptors as before", func() bool {
		last = measure()
		return last.goroutines <= first.goroutines+2 && last.files <= first.files+2
	})
	grown := after/before - 1
	if long && span >= 10*time.Minute && grown > 0.02 {
		t.Errorf("memory grew by %.1f %%", 100*grown)
	} else if grown > 1 {
		t.Errorf("memory doubled in %v: %.0f kB, %.0f kB", span, before, after)
	}
	if panics := harness.SeriesValue(string(harness.Get(t, "http://"+p.Addr+"/metrics").Body), "sluice_panics_total"); panics > 0 {
		t.Errorf("%v panics", panics)
	}
	harness.WantStatus(t, harness.Post(t, "http://"+p.Addr+"/v1/chat/completions", harness.Chat("")), 200)
	times := ""
	if long {
		times = fmt.Sprintf("good answers' p50 %v -> %v, p99 %v -> %v from the first quarter to the last; ", took[0].quantile(.5), took[1].quantile(.5), took[0].quantile(.99), took[1].quantile(.99))
	}
	harness.LogFigure(t, 18, "%v of it: %d requests, %d of whose clients left, %d answered 2xx, %d 4xx, %d 5xx; %sgoroutines %d -> %d, descriptors %d -> %d, memory %.1f -> %.1f MiB from the first quarter to the last (%+.1f %%)",
		span, asked.Load(), remaining.Load(), outcome[2].Load(), outcome[4].Load(), outcome[5].Load(), times, first.goroutines, last.goroutines, first.files, last.files, before/1024, after/1024, 100*grown)
}

// latencies collects latencies from many goroutines.
type latencies struct {
	mu  sync.Mutex
	all []time.Duration
}

func (l *latencies) add(d time.Duration) {
	l.mu.Lock()
	l.all = append(l.all, d)
	l.mu.Unlock()
}

// quantile returns a quantile of the latencies, or 0 if there are none.
func (l *latencies) quantile(q float64) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) == 0 {
		return 0
	}
	slices.Sort(l.all)
	return l.all[int(q*float64(len(l.all)-1))].Round(100 * time.Microsecond)
}

// sampleQuarters calls measure periodically until the returned function is called. That function
// returns the means of the first and the last quarter of span.
func sampleQuarters(span, every time.Duration, measure func() float64) (quarters func() (first, last float64)) {
	var sum, n [2]float64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(min(every, span/40))
		defer tick.Stop()
		for began := time.Now(); ; {
			switch part := 4 * time.Since(began) / span; part {
			case 0, 3:
				sum[part/3] += measure()
				n[part/3]++
			}
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	}()
	return func() (first, last float64) {
		close(stop)
		<-done
		return sum[0] / n[0], sum[1] / n[1]
	}
}
