package admin

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/obs"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Flags of TestConsoleInBrowser, which opens the console with simulated traffic in a browser:
//
//	go test ./router/admin -run TestConsoleInBrowser -browser chromium -shot /tmp/x.png
//
// -preview 5m instead serves the console for that time.
var (
	browser    = flag.String("browser", "", "chromium to open the console with")
	screenshot = flag.String("shot", "", "PNG file of the console")
	size       = flag.String("size", "1400,1000", "of the picture")
	preview    = flag.Duration("preview", 0, "serve made-up traffic for so long and print the address")
	more       = flag.String("more", "", "to put behind the address, such as &why=ID")
	fullPage   = flag.Int("aggregated", 0, "so many aggregated workers instead of the crew")
	dark       = flag.Bool("dark", false, "dark picture")
)

// traffic simulates requests on the fixture and on a compared router until ctx ends.
func (f *fixture) traffic(ctx context.Context, compared *obs.Metrics) {
	rng := rand.New(rand.NewPCG(1, 2))
	type live struct {
		id   string
		at   time.Time
		step int
		res  *schedule.Reservation
		pref *schedule.Reservation
		rank *worker.Rank
		ttft time.Duration
		hit  bool
	}
	var run []*live
	// Some prompts have a prefix that one rank has cached.
	tokens := make([]uint32, 1200)
	locals := blockhash.Locals(nil, tokens, 16)
	salt := blockhash.NewSalt("m", "", "")
	ix := kvindex.New(kvindex.Options{})
	engine := make([]kvindex.EngineHash, len(locals))
	for i := range engine {
		engine[i] = kvindex.EngineHash(i + 1)
	}
	for _, r := range f.fleet.ranks(worker.Prefill) {
		ix.Store(&kvindex.Stored{Slot: r.Slot, Salt: salt, Engine: engine[:65], Local: locals[:65]})
	}
	var overlap kvindex.Overlap
	ix.Find(blockhash.Seqs(nil, salt, tokens, 16), &overlap)
	if *fullPage == 0 {
		f.serveOne("first")
	}
	n := 0
	for tick := time.NewTicker(10 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		if *fullPage > 0 {
			n++
			id := fmt.Sprint("whole-", n)
			c, _ := f.scheduler.Choose(&schedule.Query{Leg: schedule.WholeLeg, Candidates: f.fleet.ranks(worker.Aggregated), PromptTokens: 1200, RequestID: id, Attempt: 1})
			time.AfterFunc(time.Second, func() {
				c.Reservation.Release()
				f.scheduler.EndRecord(id, schedule.Outcome{Status: 200, CachedTokens: -1, Total: time.Second})
				f.metrics.ResponseEnded("/v1/completions", 200, time.Second)
				f.metrics.FirstToken("/v1/completions", 20*time.Millisecond)
			})
		} else if rng.IntN(100) < 45 {
			n++
			q := &live{id: fmt.Sprintf("%08x%04x", rng.Uint32(), n), at: time.Now(), hit: rng.IntN(100) < 70}
			query := &schedule.Query{Leg: schedule.PrefillLeg, Candidates: f.fleet.ranks(worker.Prefill), PromptTokens: 1200, RequestID: q.id, Attempt: 1}
			if q.hit {
				query.Overlap = &overlap
			}
			c, _ := f.scheduler.Choose(query)
			q.pref, q.rank = c.Reservation, c.Rank
			f.metrics.LegStarted(schedule.PrefillLeg, c.Rank.ID)
			run = append(run, q)
		}
		keep := run[:0]
		for _, q := range run {
			age := time.Since(q.at)
			wait := 120 * time.Millisecond
			if q.hit {
				wait = 35 * time.Millisecond
			}
			switch {
			case q.step == 0 && age > wait+700*time.Millisecond:
				q.step = 1
				q.pref.Release()
				f.metrics.LegEnded(schedule.PrefillLeg, q.rank.ID, "ok", age)
				c, _ := f.scheduler.Choose(&schedule.Query{Leg: schedule.DecodeLeg, Candidates: f.fleet.ranks(worker.Decode), PromptTokens: 1200, MaxTokens: 100, RequestID: q.id, Attempt: 1})
				q.res, q.rank = c.Reservation, c.Rank
				f.metrics.LegStarted(schedule.DecodeLeg, c.Rank.ID)
				jitter := time.Duration(rng.ExpFloat64() * float64(9*time.Millisecond))
				q.ttft = wait + jitter
				f.metrics.FirstToken("/v1/completions", q.ttft)
				compared.FirstToken("/v1/completions", 95*time.Millisecond+4*jitter)
				hit, other := 200, 80
				if q.hit {
					hit, other = 1050, rng.IntN(1000)
				}
				f.metrics.Cached(c.Rank.ID, 1200, hit+40, hit)
				compared.Cached(c.Rank.ID, 1200, other, other)
			case q.step == 1 && age > 2500*time.Millisecond:
				q.res.Release()
				f.metrics.LegEnded(schedule.DecodeLeg, q.rank.ID, "ok", age)
				f.metrics.Streamed("/v1/completions", &relay.Result{Events: 64, Bytes: 9000, Usage: relay.Usage{Completion: 64}})
				f.metrics.ResponseEnded("/v1/completions", 200, age)
				f.scheduler.EndRecord(q.id, schedule.Outcome{Status: 200, CachedTokens: 1050, PromptTokens: 1200, OutputTokens: 64, TTFT: q.ttft, Total: age})
				continue
			}
			keep = append(keep, q)
		}
		run = keep
		for i, w := range f.fleet.workers {
			for _, r := range w.Ranks {
				r.CachedBlocks.Store(int64(min(1900, 300+n*(i+2)/4)))
				r.SetKVUsage(min(0.95, float64(r.Requests.Load())*0.02+0.05))
				r.Running.Store(r.Requests.Load())
				r.Waiting.Store(0)
			}
		}
	}
}

// shownTransfers has the form that the router's transfersView produces (TestTransferIsShown uses a
// real one).
const shownTransfers = `{"active":"zmq","reason":"nixl is off: no NIXL","tiers":[{"tier":"nixl","state":"off","reason":"no NIXL: not at /opt"},
	{"tier":"zmq","state":"up","reason":"reports are taken at tcp://10.0.0.9:8091"},{"tier":"http","state":"up","reason":"the engines' HTTP answers"}],
	"pending":41,"watched":41,"reports":{"recv_ok":1234,"recv_failed":3,"unknown":0},"outcomes":{"done":1234,"failed":3,"unknown":0},
	"pairs":[{"from":"p1/1","to":"d1/0","transfers":900,"bytes_per_s":2.5e9,"ms_per_token":0.052},{"from":"p2/0","to":"d2/0","transfers":334,"bytes_per_s":0,"ms_per_token":0}]}`

func TestConsoleInBrowser(t *testing.T) {
	if *browser == "" && *preview == 0 {
		t.Skip("needs -browser CHROMIUM or -preview DURATION")
	}
	compared := obs.NewMetrics()
	f := start(t, func(o *Options) {
		o.Compared = &Compared{Name: "round_robin", Metrics: compared}
		o.Transfers = func() any { return json.RawMessage(shownTransfers) }
	})
	if *fullPage > 0 {
		f.fleet.workers = nil
		for i := range *fullPage {
			w := worker.New(worker.Spec{ID: fmt.Sprintf("gpu-%02d", i), Models: []string{"m"}, BlockSize: 16})
			w.SetInfo(&worker.Info{Engine: "vllm", Version: "0.33.0", BlockSize: 16, TotalBlocks: 2000})
			w.SetState(worker.Ready, "")
			w.Ranks[0].Slot = worker.Slot(i)
			w.Ranks[0].Feed.Store(uint32(worker.FeedLive))
			f.fleet.workers = append(f.fleet.workers, w)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.traffic(ctx, compared) }()
	defer func() { cancel(); <-done }()
	if *preview > 0 {
		fmt.Println(f.URL())
		time.Sleep(*preview)
		return
	}
	testwait.Until(t, "some history", func() bool { h, _, _ := f.ownSampler.since(0); return len(h) > 24 })
	args := []string{"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--user-data-dir=" + t.TempDir(), "--window-size=" + *size,
		"--enable-logging=stderr"}
	if *dark {
		args = append(args, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
	}
	if *screenshot != "" {
		args = append(args, "--screenshot="+*screenshot)
	} else {
		args = append(args, "--dump-dom")
	}
	// The browser takes the picture when the page's virtual time has passed. On a busy machine
	// some calls may not have their responses by then.
	var missing []string
	for _, seconds := range []int{4, 12, 30} {
		out := browse(t, append(args, fmt.Sprintf("--timeout=%d", 1500*seconds), fmt.Sprintf("--virtual-time-budget=%d", 1000*seconds), f.URL()+*more))
		if *screenshot != "" {
			return
		}
		missing = nil
		for _, want := range []string{"workers not ready", "p1/1", "d2/0", "round robin",
			"notifications over zmq", "no NIXL: not at /opt", "41 in flight; ended: 1,234 done, 3 failed", "<td class=\"n\">2.50 GB/s</td><td class=\"n\">52.0</td>"} {
			if !strings.Contains(out, want) {
				missing = append(missing, want)
			}
		}
		if missing == nil {
			return
		}
	}
	t.Errorf("the page does not show %q", missing)
}

// browse runs the browser until it exits and returns its output.
func browse(t *testing.T, args []string) string {
	t.Helper()
	limit, stop := context.WithTimeout(t.Context(), 120*time.Second)
	defer stop()
	cmd := exec.CommandContext(limit, *browser, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	for line := range strings.Lines(errs.String()) {
		if strings.Contains(line, "CONSOLE") {
			t.Errorf("the page complains: %s", line)
		}
	}
	return string(out)
}
