package fleet

import (
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

func TestIntervals(t *testing.T) {
	pace := Options{}.Settings()
	const ms = time.Millisecond
	for _, c := range []struct {
		servers                                                 int
		probe, idleProbe, answering, scrape, idleScrape, models time.Duration
	}{
		{1, 500 * ms, 500 * ms, 500 * ms, 1000 * ms, 1000 * ms, 10 * time.Second},
		{50, 500 * ms, 500 * ms, 781250 * time.Microsecond, 1000 * ms, 1000 * ms, 10 * time.Second},
		{64, 500 * ms, 500 * ms, 1000 * ms, 1000 * ms, 1280 * ms, 10 * time.Second},
		{256, 500 * ms, 2000 * ms, 4000 * ms, 1000 * ms, 5120 * ms, 15360 * ms},
		{1000, 500 * ms, 3750 * ms, 7500 * ms, 2500 * ms, 20 * time.Second, 60 * time.Second},
		{4096, 500 * ms, 3750 * ms, 7500 * ms, 10240 * ms, 20 * time.Second, 60 * time.Second},
	} {
		iv := pace.intervals(c.servers)
		want := intervals{c.probe, c.idleProbe, c.answering, c.scrape, c.idleScrape, c.models, iv.tick}
		if iv != want {
			t.Errorf("%d servers: %+v, want %+v", c.servers, iv, want)
		}
	}
	// The configured interval is a lower bound in every case.
	for _, o := range []Options{
		{ProbeInterval: time.Minute, ScrapeInterval: time.Hour},
		{ProbeInterval: 10 * ms, ProbeTimeout: ms, ScrapeInterval: 10 * ms},
		{ProbeTimeout: 20 * time.Second, UnhealthyThreshold: 1000},
		{ScrapeInterval: -1},
	} {
		p := o.Settings()
		for _, n := range []int{0, 1, 1000, worker.MaxSlots} {
			iv := p.intervals(n)
			if iv.probe != p.ProbeInterval || iv.idleProbe < iv.probe || iv.answering < iv.idleProbe || iv.scrape < p.ScrapeInterval || iv.idleScrape < iv.scrape || iv.tick <= 0 {
				t.Errorf("%d servers, %+v: %+v", n, o, iv)
			}
		}
	}
}

// However many servers there are, one that dies is out within five seconds, if the probes
// themselves can be so fast.
func TestDetectIdleWithin(t *testing.T) {
	for n := range worker.MaxSlots {
		if d := (Options{}).DetectIdleWithin(n); d > idleWithin || d < (Options{}).DetectWithin() {
			t.Fatalf("%d servers: %s", n, d)
		}
	}
	slow := Options{ProbeInterval: 10 * time.Second}
	if d := slow.DetectIdleWithin(1000); d != slow.DetectWithin() {
		t.Errorf("%s; want %s", d, slow.DetectWithin())
	}
}

// When a server is probed next, by what is known of it.
func TestNextProbe(t *testing.T) {
	pace := Options{}.Settings()
	iv := pace.intervals(1000)
	const now = time.Hour
	const ms = time.Millisecond
	for _, c := range []struct {
		name          string
		down, urgent  bool
		downFor       time.Duration
		fails         int32
		requests      int64
		heard, probed time.Duration // ago
		at            time.Duration // from now
		uncertain     bool
	}{
		{"idle", false, false, 0, 0, 0, time.Minute, time.Second, 2750 * ms, false},
		{"silent with requests", false, false, 0, 0, 1, time.Minute, 3 * time.Second, -2500 * ms, true},
		{"silent since its last probe", false, false, 0, 0, 1, time.Minute, 100 * ms, 400 * ms, true},
		{"answering", false, false, 0, 0, 1, 100 * ms, time.Second, 400 * ms, true},
		{"answering, and not probed for long", false, false, 0, 0, 1, 100 * ms, 8 * time.Second, -500 * ms, false},
		{"answered a moment ago", false, false, 0, 0, 0, 900 * ms, 2 * time.Second, -400 * ms, true},
		{"a request failed", false, true, 0, 0, 0, time.Minute, time.Second, -875 * ms, true},
		{"a probe failed", false, false, 0, 1, 0, time.Minute, 300 * ms, 200 * ms, true},
		{"it fell", true, false, 10 * time.Second, 5, 0, time.Minute, 300 * ms, 200 * ms, true},
		{"it fell long ago", true, false, time.Minute, 5, 0, time.Minute, 300 * ms, 3450 * ms, false},
	} {
		r := &worker.Rank{}
		r.Requests.Store(c.requests)
		s := &server{ranks: []*worker.Rank{r}}
		s.up.Store(!c.down)
		s.schedule.urgent.Store(c.urgent)
		s.schedule.fails.Store(c.fails)
		s.schedule.downSince.Store(int64(now - c.downFor))
		s.schedule.lastAnswer.Store(int64(now - c.heard))
		s.schedule.probed.Store(int64(now - c.probed))
		at, uncertain := s.nextProbe(now, &iv, s.busy(now, &iv))
		if at != now+c.at || uncertain != c.uncertain {
			t.Errorf("%s: in %s, in doubt %v; want in %s, %v", c.name, at-now, uncertain, c.at, c.uncertain)
		}
	}
}

// TestIdleScrapesFollowProbes: the metrics of a server without requests are read behind the probe
// that is nearest to the time when they are due, and by themselves if none comes.
func TestIdleScrapesFollowProbes(t *testing.T) {
	const ms, now = time.Millisecond, time.Hour
	for _, c := range []struct {
		name                string
		opt                 Options
		servers             int
		requests, running   int64
		probed, scraped     time.Duration // ago
		probe, next, scrape bool          // a probe starts; a scrape starts after it; a scrape starts now
	}{
		{"a probe before it is due", Options{}, 1000, 0, 0, 3750 * ms, 19 * time.Second, true, true, false},
		{"a probe long before", Options{}, 1000, 0, 0, 3750 * ms, 16 * time.Second, true, false, false},
		{"due between two probes", Options{}, 1000, 0, 0, 2000 * ms, 21 * time.Second, false, false, false},
		{"no probe comes", Options{}, 1000, 0, 0, 2000 * ms, 24 * time.Second, false, false, true},
		{"requests", Options{}, 1000, 1, 0, 100 * ms, 2500 * ms, false, false, true},
		{"requests of other routers", Options{}, 1000, 0, 1, 2000 * ms, 2500 * ms, false, false, true},
		{"requests of other routers, and a probe", Options{}, 1000, 0, 1, 3750 * ms, 1000 * ms, true, false, false},
		{"probes are rare", Options{ProbeInterval: time.Minute}, 1, 0, 0, time.Second, 1000 * ms, false, false, true},
	} {
		p := c.opt.Settings()
		iv := p.intervals(c.servers)
		r := &worker.Rank{}
		r.Requests.Store(c.requests)
		r.Running.Store(c.running)
		s := &server{ranks: []*worker.Rank{r}}
		s.schedule.init()
		s.up.Store(true)
		s.live.Store(true)
		s.schedule.lastAnswer.Store(int64(now - time.Minute))
		s.schedule.probed.Store(int64(now - c.probed))
		s.schedule.scraped.Store(int64(now - c.scraped))
		s.startDue(now, &iv)
		if probe, next, scrape := len(s.schedule.probeNow) > 0, s.schedule.scrapeNext.Load(), len(s.schedule.scrapeNow) > 0; probe != c.probe || next != c.next || scrape != c.scrape {
			t.Errorf("%s: probe %v, scrape after it %v, scrape by itself %v; want %v, %v, %v", c.name, probe, next, scrape, c.probe, c.next, c.scrape)
		}
	}
}

// A server that answers requests is not probed in between.
func TestTrafficReplacesProbes(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ProbeInterval: 50 * time.Millisecond, ProbeTimeout: time.Second, ScrapeInterval: -1})
	// The intervals of a large fleet, with one engine.
	many := make([]*server, 999)
	for i := range many {
		many[i] = idleServer(f)
	}
	mustAdd(t, f, worker.Spec{ID: "d", URL: e.url()})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
	f.mu.Lock()
	f.watchServers(append(many, *f.servers.Load()...))
	f.mu.Unlock()
	rank.Requests.Add(1)
	probes := func(traffic bool) int64 {
		before := e.count("/health")
		for end := time.Now().Add(time.Second); time.Now().Before(end); testwait.Pace(5 * time.Millisecond) {
			if traffic {
				f.ReportStatus(rank, 200)
			}
		}
		return e.count("/health") - before
	}
	answered := testwait.MedianOf(3, func() int64 { return probes(true) })
	silent := testwait.MedianOf(3, func() int64 { return probes(false) })
	t.Logf("%d probes of a server that answers, %d of one that is silent", answered, silent)
	if answered > 4 || silent < 8 {
		t.Errorf("%d probes in a second of a server that answers, %d of one that has requests and is silent", answered, silent)
	}
	rank.Requests.Add(-1)
	f.mu.Lock()
	f.watchServers((*f.servers.Load())[999:])
	f.mu.Unlock()
}

// idleServer is one that is never due.
func idleServer(f *Fleet) *server {
	s := &server{member: &member{fleet: f}}
	s.schedule.init()
	s.schedule.probing.Store(true)
	return s
}
