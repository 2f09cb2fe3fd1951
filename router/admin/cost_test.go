package admin

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/requestlog"
	"sluice/router/requestlog/recent"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// largeFleet is a fleet of 500 workers with two ranks each, and requests: 500 that have ended and 200
// that run.
func largeFleet(t testing.TB, f *fakeFleet, timelines *recent.Ring, s *schedule.Scheduler) {
	t.Helper()
	f.workers = nil
	for i := range 500 {
		role := worker.Prefill
		if i%2 == 1 {
			role = worker.Decode
		}
		w := worker.New(worker.Spec{ID: fmt.Sprintf("llama-70b-%v-rack%02d-node%03d", role, i/20, i), URL: fmt.Sprintf("http://10.0.%d.%d:8000", i/250, i%250), Role: role, Ranks: []uint16{0, 1}, Models: []string{"llama-70b"}, BlockSize: 16, Labels: []string{"zone=a"}, Source: "kubernetes"})
		w.SetInfo(&worker.Info{Models: w.Spec.Models, Engine: "vllm", Version: "0.33.0", BlockSize: 16, TotalBlocks: 60000})
		w.SetState(worker.Ready, "")
		for j, r := range w.Ranks {
			r.Slot = worker.Slot(2*i + j)
			r.Feed.Store(uint32(worker.FeedLive))
			r.SetKVUsage(float64(i) / 517)
			r.CachedBlocks.Store(int64(50000 + i))
			r.Requests.Store(int64(i % 40))
			r.PrefillTokens.Store(int64(i * 1000))
			r.DecodeBlocks.Store(int64(i * 900))
			r.Running.Store(int64(i % 64))
			r.Waiting.Store(int64(i % 3))
		}
		f.workers = append(f.workers, w)
	}
	l := requestlog.New(timelines)
	for i := range 500 {
		e := l.Begin(requestlog.Request{ID: fmt.Sprintf("ended-%d", i), Model: "llama-70b", Key: "team-a", Endpoint: "/v1/chat/completions", Stream: true, Received: time.Now()})
		for _, kind := range []string{"prefill", "decode"} {
			e.EndLeg(e.StartLeg(kind, f.workers[i].Spec.ID, 0, 100, time.Now()), "ok", time.Millisecond)
		}
		e.Finish(requestlog.Outcome{Status: 200, CachedTokens: 48, OutputTokens: 9, FirstToken: 30 * time.Millisecond, Total: 90 * time.Millisecond}, 500)
	}
	for i := range maxRunning {
		for _, leg := range []schedule.LegKind{schedule.PrefillLeg, schedule.DecodeLeg} {
			role := worker.Prefill
			if leg == schedule.DecodeLeg {
				role = worker.Decode
			}
			if c, ok := s.Choose(&schedule.Query{Leg: leg, Candidates: f.ranks(role), PromptTokens: 500, RequestID: fmt.Sprintf("running-%d", i), Attempt: 1}); !ok || c.Rank == nil {
				t.Fatal("no rank was chosen")
			}
		}
	}
}

// page is a response of which only the length is kept.
type page struct {
	header http.Header
	code   int
	bytes  int
}

func (p *page) Header() http.Header  { return p.header }
func (p *page) WriteHeader(code int) { p.code = code }
func (p *page) Write(b []byte) (int, error) {
	p.bytes += len(b)
	return len(b), nil
}

// overviewPoll is the poll of the console's overview, which polls most often and asks for most.
const overviewPoll = "/admin/v1/status?parts=workers%2Crequests%2Ctransfers&limit=60&since=0"

// pollAs returns a function that makes one poll and returns the length of its document.
func pollAs(t testing.TB, s *Server, path string) func() int {
	req := httptest.NewRequest("GET", "http://"+s.Addr()+path, nil)
	req.Header.Set("Authorization", "Bearer "+testToken)
	h := s.http.Handler
	return func() int {
		p := &page{header: http.Header{}}
		h.ServeHTTP(p, req)
		if p.code != 0 && p.code != 200 {
			t.Fatalf("status %d", p.code)
		}
		return p.bytes
	}
}

// BenchmarkStatus is one poll of the overview at 1,000 ranks, with a list of workers that is made for
// it, or that another client has asked for before (shared). cpu-% is what an open overview takes of a
// core at two polls a second.
func BenchmarkStatus(b *testing.B) {
	for _, shared := range []bool{false, true} {
		b.Run(map[bool]string{false: "alone", true: "shared"}[shared], func(b *testing.B) {
			f := start(b, nil)
			largeFleet(b, f.fleet, f.timelines, f.scheduler)
			poll, n := pollAs(b, f.Server, overviewPoll), 0
			b.ReportAllocs()
			before := cpuTime(b)
			for b.Loop() {
				if !shared {
					f.workerList.changed()
				}
				n = poll()
			}
			b.ReportMetric(float64(n), "B/poll")
			b.ReportMetric(100*2*(cpuTime(b)-before).Seconds()/float64(b.N), "cpu-%")
		})
	}
}

func cpuTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestOverviewCost: an open overview of 1,000 ranks takes less than 2 % of a core: its two updates a
// second, with the encoding of the list of workers, the garbage collector and the sampling of the
// metrics. BenchmarkStatus prints the parts.
func TestOverviewCost(t *testing.T) {
	if testing.Short() {
		t.Skip("measures CPU time")
	}
	f := start(t, nil)
	largeFleet(t, f.fleet, f.timelines, f.scheduler)
	poll := pollAs(t, f.Server, overviewPoll)
	poll()
	bytes := 0
	share := testwait.MedianOf(5, func() float64 {
		runtime.GC()
		const polls = 40
		before := cpuTime(t)
		for range polls {
			f.workerList.changed()
			bytes = poll()
		}
		return 2 * (cpuTime(t) - before).Seconds() / polls
	})
	t.Logf("an overview of 1,000 ranks takes %.2f %% of a core, %d bytes an update", 100*share, bytes)
	if share > 0.02 {
		t.Errorf("an overview of 1,000 ranks takes %.1f %% of a core, want 2 at most", 100*share)
	}
}

// TestWorkerListIsShared: clients that ask at the same time get one list, a change makes a new one at
// once, and otherwise one is made after sharedFor.
func TestWorkerListIsShared(t *testing.T) {
	var l workerList
	made := 0
	build := func(int) *workerDocument { made++; return &workerDocument{} }
	now := time.Now()
	for i, c := range []struct {
		at      time.Duration
		changed bool
		want    int
	}{{0, false, 1}, {sharedFor - 1, false, 1}, {sharedFor, false, 2}, {sharedFor + 1, true, 3}, {2 * sharedFor, false, 3}, {2*sharedFor + 1, false, 4}} {
		if c.changed {
			l.changed()
		}
		if l.document(now.Add(c.at), build); made != c.want {
			t.Errorf("call %d: %d lists were made, want %d", i, made, c.want)
		}
	}
	var all sync.WaitGroup
	made = 0
	l.changed()
	for range 16 {
		all.Go(func() { l.document(now.Add(3*sharedFor), build) })
	}
	if all.Wait(); made != 1 {
		t.Errorf("16 clients at once made %d lists, want 1", made)
	}
}

// TestWorkerListEncoding: the list that is encoded by hand is the one that encoding/json makes of
// Worker, whatever its strings and numbers are.
func TestWorkerListEncoding(t *testing.T) {
	f := start(t, nil)
	odd := worker.New(worker.Spec{ID: "a\"\\\n<&>\u2028é", URL: "http://me:hunter2@10.0.0.9:1/x?y=1&z", Role: worker.Aggregated, Ranks: []uint16{0, 65535}, Labels: []string{"a=b", "c\t"}, Source: "dns"})
	odd.SetInfo(&worker.Info{Models: []string{"m\u0000", ""}, Engine: "vl\"lm", Version: "1\\2", TotalBlocks: -1})
	odd.SetState(worker.Unhealthy, "probe: \"x\"\n\x1b")
	for i, r := range odd.Ranks {
		r.Slot = worker.Slot(100 + i)
		r.SetKVUsage([]float64{1e-9, 1.0 / 3}[i])
		r.CachedBlocks.Store(1 << 60)
		r.Requests.Store(-5)
	}
	f.fleet.workers = append(f.fleet.workers, odd)
	var got, want []Worker
	d := f.workerDocument(0)
	if err := json.Unmarshal(d.body, &got); err != nil {
		t.Fatalf("%v: %s", err, d.body)
	}
	for _, w := range f.fleet.workers {
		v := f.workerView(w)
		// JSON has neither nil lists nor invalid UTF-8.
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		v = Worker{}
		if err := json.Unmarshal(b, &v); err != nil {
			t.Fatal(err)
		}
		want = append(want, v)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
	// Every member is written, also a new one: the names are those of the types.
	var members []map[string]any
	_ = json.Unmarshal(d.body, &members)
	rank := members[len(members)-1]["ranks"].([]any)[0].(map[string]any)
	for _, c := range []struct {
		have map[string]any
		of   reflect.Type
	}{{members[len(members)-1], reflect.TypeFor[Worker]()}, {rank, reflect.TypeFor[Rank]()}} {
		if c.of.NumField() != len(c.have) {
			t.Errorf("%v has %d members, and %d are encoded: %v", c.of, c.of.NumField(), len(c.have), c.have)
		}
	}
	odd.Ranks[0].SetKVUsage(math.NaN())
	if err := json.Unmarshal(f.workerDocument(0).body, &got); err != nil || got[len(got)-1].Ranks[0].KVUsage != -1 {
		t.Errorf("a KV usage that is not a number: %v, %+v", err, got[len(got)-1].Ranks[0])
	}
}
