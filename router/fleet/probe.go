package fleet

import (
	"context"
	"errors"
	"syscall"
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/upstream"
)

// firstProbe is the shortest time limit of a health probe before the engine's kind is known:
// SGLang's /health takes over a second.
const firstProbe = 3 * time.Second

// probe sends a health probe whenever the schedule requests one, until ctx ends. Probes of one
// server never overlap.
func (s *server) probe(ctx context.Context) {
	var a httpGetter
	defer a.bindContext(ctx)()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.schedule.probeNow:
		}
		s.probeOnce(ctx, &a)
		s.schedule.probing.Store(false)
		if s.schedule.scrapeNext.Swap(false) && s.live.Load() {
			s.startScrape()
		}
	}
}

func (s *server) probeOnce(ctx context.Context, a *httpGetter) {
	pace := s.member.fleet.settings.Load()
	downs := s.downCount.Load()
	began := monotime.Uptime()
	limit := pace.ProbeTimeout
	paths := s.pathsToProbe(&pace.Settings)
	if !s.pathKnown {
		limit = max(limit, firstProbe)
	}
	at, answered, err := a.checkHealth(s.probes, paths, s.path%len(paths), limit)
	if answered {
		s.evidence.add(nil)
	} else {
		s.evidence.add(err)
	}
	s.path = at
	if err != nil && !errors.Is(err, upstream.ErrTimeout) {
		s.path = 0 // another engine may return
	}
	if ep := s.bootstrap.Load(); ep != nil && s.live.Load() && err == nil {
		// A prefill engine without its bootstrap server makes every hand-over hang.
		if _, berr := a.status(ep, "/health", time.Now().Add(pace.ProbeTimeout)); berr != nil {
			err = &bootstrapError{ep.URL(), berr}
		}
	}
	switch {
	case ctx.Err() != nil, errors.Is(err, upstream.ErrLocalResources) && s.up.Load(): // this router's own shortage
		return
	case err == nil:
		s.schedule.fails.Store(0)
		s.markUp(downs)
		return
	}
	hung := errors.Is(err, upstream.ErrTimeout)
	fails := int32(1)
	switch {
	case hung && s.up.Load() && s.schedule.lastAnswer.Load() >= int64(began):
		// The probe hung while traffic was answered: the engine is busy, not dead.
		return
	case hung:
		if !s.pathKnown {
			s.path++
		}
		fails = max(int32((monotime.Uptime()-began)/pace.ProbeInterval), 1)
	}
	s.noteRefused(err)
	if int(s.schedule.fails.Add(fails)) >= pace.UnhealthyThreshold || !s.up.Load() {
		s.markDown(short(err))
	}
}

// bootstrapError: the SGLang engine is healthy, and its bootstrap server is not.
type bootstrapError struct {
	url string
	err error
}

func (e *bootstrapError) Error() string {
	return "its bootstrap server at " + e.url + ": " + e.err.Error()
}
func (e *bootstrapError) Unwrap() error { return e.err }

// pathsToProbe returns the paths of the next health probe. When the engine's kind becomes known,
// and after an outage, the best path is tried first again.
func (s *server) pathsToProbe(pace *Settings) []string {
	if !s.pathKnown && (s.isSGLang.Load() || s.incarnation.Load() != nil) {
		s.pathKnown, s.path = true, 0
	}
	named := s.member.worker.Spec.HealthPath
	if named == "" {
		named = pace.HealthPath
	}
	return healthPaths(named, s.isSGLang.Load())
}

func (s *server) noteRefused(err error) {
	if errors.Is(err, syscall.ECONNREFUSED) {
		s.refused.Store(true)
	}
}
