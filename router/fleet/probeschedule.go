package fleet

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"sluice/dataplane/monotime"
)

// This file decides when a server is probed and when its metrics are read.
//
// One goroutine, schedule, checks all servers at short intervals and starts what is due. Each
// server has a goroutine that probes and one that scrapes, which otherwise sleep. The intervals
// depend on what is at stake:
//
//   - A server that has running requests and is silent is probed after ProbeInterval,
//     regardless of the number of servers. So is a server whose last probe failed, one
//     of which a request has just failed, and one that went down recently.
//   - Responses to requests show that a server is alive, and replace these probes.
//     A server that answers requests is still probed occasionally: its engine may
//     report that it is unhealthy.
//   - All others are probed at an interval that grows with the number of servers, so
//     that the total rate of probes is bounded, up to the interval at which a server
//     that dies without a request is detected within idleWithin.
//   - Metrics are read by the same rule, with intervals of their own.

const (
	// idleWithin is the longest time that a dead server without requests stays in the pools.
	idleWithin = 5 * time.Second
	// Totals per second over all servers: probes, readings of metrics of servers without requests,
	// and of servers with requests.
	probeRate      = 128
	answeringRate  = 64 // probes of servers that answer requests
	idleScrapeRate = 50
	scrapeRate     = 400
	// maxIdleScrape bounds the interval between readings of the metrics of a server without
	// requests: other routers may send it some.
	maxIdleScrape = 20 * time.Second
	// downProbeTime is how long a server that went down is probed as often as one with requests.
	downProbeTime = 30 * time.Second
	// intervalJitter is the largest fraction of an interval by which it is shortened at random, so
	// that servers that joined together are not probed together.
	intervalJitter = 1.0 / 16
	// absentFactor is the factor by which the interval of /metrics is longer if the server has
	// none.
	absentFactor = 10
	// ticks is how many times per shortest interval servers are checked. In fleets so large that
	// intervals grow, what is due is started in fewer, larger groups: each group wakes the process
	// once.
	ticks, coarseTicks = 4, 2
)

// probeSchedule is the schedule's state of a server.
type probeSchedule struct {
	probeNow, scrapeNow chan struct{}
	probing, scraping   atomic.Bool  // one was started and has not ended
	scrapeNext          atomic.Bool  // start a scrape when the current probe has succeeded
	urgent              atomic.Bool  // probe at once: there is a sign that the server died
	lastAnswer          atomic.Int64 // when traffic was last answered, by monotime.Uptime
	downSince           atomic.Int64 // by monotime.Uptime
	fails               atomic.Int32 // consecutive failed probes
	noMetrics           atomic.Bool  // the server has no /metrics

	// When the last one was started, by monotime.Uptime.
	probed, scraped atomic.Int64

	jitter float64 // used by the schedule only: the fraction of an interval by which it is shortened
}

func (w *probeSchedule) init() {
	w.probeNow, w.scrapeNow = make(chan struct{}, 1), make(chan struct{}, 1)
	now := monotime.Uptime()
	w.downSince.Store(int64(now))
	w.probed.Store(int64(now - time.Hour))
	w.scraped.Store(int64(now))
}

// intervals are the times between two probes, and between two readings of metrics, of one server.
type intervals struct {
	probe, idleProbe   time.Duration
	answering          time.Duration // probes of a server that answers requests
	scrape, idleScrape time.Duration // 0: never
	models             time.Duration // between two requests for the models; 0: never
	tick               time.Duration // between two checks of the servers
}

// intervals returns the intervals for a number of servers.
func (p *Settings) intervals(servers int) intervals {
	share := func(rate int) time.Duration { return time.Duration(servers) * time.Second / time.Duration(rate) }
	iv := intervals{probe: p.ProbeInterval, scrape: max(p.ScrapeInterval, 0)}
	iv.tick = iv.probe
	if iv.scrape > 0 {
		iv.tick = min(iv.tick, iv.scrape)
		iv.models = modelsEvery * iv.scrape
		iv.idleScrape = max(iv.scrape, min(share(idleScrapeRate), maxIdleScrape))
		iv.scrape = max(iv.scrape, min(share(scrapeRate), maxIdleScrape))
	}
	n := time.Duration(ticks)
	if share(probeRate) > iv.probe {
		n = coarseTicks
	}
	iv.tick = max(iv.tick/n, time.Millisecond)
	iv.idleProbe = max(iv.probe, min(share(probeRate), p.maxIdleProbe(iv.tick)))
	iv.answering = max(iv.idleProbe, min(share(answeringRate), 2*iv.idleProbe))
	iv.models = max(iv.models, modelsScrapes*iv.idleScrape)
	return iv
}

// maxIdleProbe is the longest interval of probes with which a dead server is detected within
// idleWithin and the connection for probes is used often enough to be kept.
func (p *Settings) maxIdleProbe(tick time.Duration) time.Duration {
	limit := idleWithin - (p.detectWithin() - p.ProbeInterval) - tick
	return min(limit, p.Engines.IdleTimeout*15/16)
}

// intervals returns the current intervals.
func (f *Fleet) intervals() intervals {
	pace := f.settings.Load()
	return pace.intervals(len(*f.servers.Load()))
}

// schedule starts probes and readings of metrics when they are due, until the fleet closes.
func (f *Fleet) schedule() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var now time.Duration
	for {
		pace := f.settings.Load()
		select {
		case <-f.ctx.Done():
			return
		case <-pace.replaced:
		case <-f.recheck:
			// Many callers may request a check at once.
			timer.Reset(max(now+time.Millisecond-monotime.Uptime(), 0))
			continue
		case <-timer.C:
		}
		now = monotime.Uptime()
		servers := *f.servers.Load()
		iv := f.intervals()
		next := now + time.Hour
		if iv.idleProbe > iv.probe {
			next = now + iv.tick // requests may have been placed on a server meanwhile
		}
		for _, s := range servers {
			next = min(next, s.startDue(now, &iv))
		}
		minTick := iv.tick / 2
		if iv.idleProbe > iv.probe {
			minTick = iv.tick
		}
		timer.Reset(max(next-monotime.Uptime(), minTick))
	}
}

// recheckSoon makes the schedule check all servers now.
func (f *Fleet) recheckSoon() {
	select {
	case f.recheck <- struct{}{}:
	default:
	}
}

// startDue starts what is due for s, and returns when the next may be.
func (s *server) startDue(now time.Duration, iv *intervals) (next time.Duration) {
	w := &s.schedule
	live, busy := s.live.Load(), s.busy(now, iv)
	next = now + iv.tick // while a probe is running
	if !w.probing.Load() {
		// Suspected servers are probed too early rather than too late.
		soon := now + iv.tick
		at, suspected := s.nextProbe(now, iv, busy)
		if !suspected {
			soon = now + iv.tick/2
		}
		if at > soon {
			next = at
		} else {
			s.startProbe(now)
		}
	}
	switch {
	case iv.scrape == 0:
		return next
	case !live:
		// The first reading of a server that joins follows soon.
		w.scraped.Store(int64(now - iv.idleScrape + time.Duration(rand.Float64()*float64(iv.scrape))))
		return next
	}
	// A reading follows a probe on the same connection, while its goroutine is awake and its memory
	// is in the caches. Without requests it follows the nearest probe.
	at, idle := s.nextScrape(iv, busy)
	early, late := iv.tick/2, time.Duration(0)
	if idle && iv.idleScrape >= 2*iv.idleProbe {
		early, late = max(early, iv.idleProbe/2), iv.idleProbe
	}
	switch {
	case w.scraping.Load():
	case w.probing.Load() && at <= now+early:
		w.scrapeNext.Store(true)
	case at+late > now+iv.tick/2:
		next = min(next, at+late)
	default: // no probe has come
		s.startScrape()
	}
	return next
}

// busy reports whether s has running requests, or has answered some recently.
func (s *server) busy(now time.Duration, iv *intervals) bool {
	return s.hasRequests() || now-time.Duration(s.schedule.lastAnswer.Load()) < 2*iv.probe
}

// nextProbe returns when the next probe of s is due, and whether s is suspected to be dead.
func (s *server) nextProbe(now time.Duration, iv *intervals, busy bool) (at time.Duration, suspected bool) {
	w := &s.schedule
	up, probed := s.up.Load(), time.Duration(w.probed.Load())
	switch {
	case w.urgent.Load():
		return probed + iv.probe/ticks, true
	case up && w.fails.Load() > 0, !up && now-time.Duration(w.downSince.Load()) < downProbeTime:
		return probed + iv.probe, true
	case !busy:
		return probed + shorter(iv.idleProbe, w.jitter), false
	}
	regular := probed + shorter(iv.answering, w.jitter)
	silent := max(probed, time.Duration(w.lastAnswer.Load())) + iv.probe
	return min(regular, silent), silent < regular
}

// nextScrape returns when the metrics of s are due to be read, and whether s has no requests, of
// this router or of others.
func (s *server) nextScrape(iv *intervals, busy bool) (at time.Duration, idle bool) {
	w := &s.schedule
	scraped := time.Duration(w.scraped.Load())
	idle = !busy && w.lastAnswer.Load() <= int64(scraped) && !s.loaded()
	interval := iv.scrape
	if idle {
		interval = iv.idleScrape
	}
	if w.noMetrics.Load() {
		interval = max(interval, min(absentFactor*iv.scrape, maxIdleScrape))
	}
	return scraped + shorter(interval, w.jitter), idle
}

// loaded reports whether the engine had requests when its metrics were last read: of this router or
// of others.
func (s *server) loaded() bool {
	for _, r := range s.ranks {
		if r.Running.Load() > 0 || r.Waiting.Load() > 0 {
			return true
		}
	}
	return false
}

func shorter(interval time.Duration, slack float64) time.Duration {
	return interval - time.Duration(slack*float64(interval))
}

// startProbe makes the server's goroutine send a probe. Only the schedule calls it.
func (s *server) startProbe(now time.Duration) {
	w := &s.schedule
	w.urgent.Store(false)
	w.jitter = rand.Float64() * intervalJitter
	w.probed.Store(int64(now))
	w.probing.Store(true)
	w.probeNow <- struct{}{} // does not block: no other probe is running
}

// startScrape makes the server's goroutine read the metrics, unless it is doing so.
func (s *server) startScrape() {
	w := &s.schedule
	if w.scraping.CompareAndSwap(false, true) {
		w.scraped.Store(int64(monotime.Uptime()))
		w.scrapeNow <- struct{}{} // does not block: no other scrape is running
	}
}

// probeSoon makes s be probed at once: there is a sign that it died.
func (s *server) probeSoon() {
	if !s.schedule.urgent.Swap(true) {
		s.member.fleet.recheckSoon()
	}
}
