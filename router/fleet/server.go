package fleet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/upstream"
	"sluice/router/liveness"
	"sluice/router/worker"
)

// server is one HTTP server of an engine: the worker's own, which serves all of its ranks, or that
// of one rank if ranks have URLs of their own.
//
// up, live and downCount change under the fleet's mu only and are read without it. up means that
// the engine answers; live that it was also inspected since it came up: only live servers' ranks
// are in pools. downCount counts the times the server went down, so that a probe or an admission
// that began before cannot undo it.
type server struct {
	member   *member
	url      string
	ranks    []*worker.Rank
	breakers []*rankBreaker // one per rank, in the order of ranks
	traffic  *upstream.Endpoint
	probes   *upstream.Endpoint // own connections: probes must not wait behind traffic

	up, live  atomic.Bool
	downCount atomic.Uint32
	// admissions counts how often the server became live; see Fleet.Admissions.
	admissions atomic.Uint32
	// restarts counts how often the engine was found to be another process than before; see
	// Fleet.Incarnation.
	restarts atomic.Uint32

	trafficFails atomic.Int32
	refused      atomic.Bool // a connection was refused since the last admission
	isSGLang     atomic.Bool
	schedule     probeSchedule
	evidence     serverEvidence
	detector     liveness.Detector           // used by detectFrozen only
	anyFrozen    bool                        // a rank is frozen; used by detectFrozen only
	incarnation  atomic.Pointer[incarnation] // of the process admitted last
	engineIDs    engineIDs

	// bootstrap is the bootstrap server of an SGLang prefill worker; nil until queried, and for all
	// others. run stores it.
	bootstrap atomic.Pointer[upstream.Endpoint]

	// Used by the prober only.
	path      int  // index in healthPaths of the last path that was answered
	pathKnown bool // path is chosen for the engine's kind

	models seenModels // used by the scraper only
}

// trafficFailed counts a failure; after UnhealthyThreshold in a row the server goes down at once.
func (s *server) trafficFailed(err error) {
	s.probeSoon()
	if n := s.trafficFails.Add(1); int(n) < s.member.fleet.settings.Load().UnhealthyThreshold || !s.up.Load() {
		return
	}
	s.noteRefused(err)
	s.markDown("traffic: " + short(err))
}

// markUp marks the server up unless it went down since downs was read.
func (s *server) markUp(downs uint32) {
	if s.up.Load() {
		return
	}
	f := s.member.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.up.Load() || s.downCount.Load() != downs || s.member.removed {
		return
	}
	s.trafficFails.Store(0)
	s.up.Store(true)
	s.member.wakeUp()
}

// markDown removes the server's ranks from the pools at once.
func (s *server) markDown(reason string) {
	f := s.member.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.member.removed {
		return
	}
	s.member.lastFailure = reason
	if !s.up.Load() {
		s.member.updateState() // only to update the reason of its state
		return
	}
	s.downCount.Add(1)
	s.up.Store(false)
	s.schedule.downSince.Store(int64(monotime.Uptime()))
	s.withdraw(reason)
}

// withdraw removes a server from the pools until it is admitted again. Called with mu.
func (s *server) withdraw(reason string) {
	s.live.Store(false)
	for _, r := range s.ranks {
		setUnknownLoad(r)
	}
	if len(s.member.servers) > 1 {
		s.member.fleet.opt.Log.Warn("server unavailable", "worker", s.member.worker.Spec.ID, "url", s.url, "reason", reason)
	}
	s.member.updateState()
	s.member.fleet.publish()
	s.member.wakeUp()
}

// admit puts the server's ranks into the pools unless it went down since downs was read. Called
// with mu.
func (s *server) admit(downs uint32) {
	if s.up.Load() && s.downCount.Load() == downs {
		s.live.Store(true)
		s.admissions.Add(1)
		s.refused.Store(false)
		for _, t := range s.breakers {
			t.reset()
		}
	}
}

func (s *server) close() {
	s.traffic.Close()
	s.probes.Close()
	if ep := s.bootstrap.Load(); ep != nil {
		ep.Close()
	}
}

// get is Endpoint.Get that ends when ctx does. For repeated requests see httpGetter.
func get(ctx context.Context, ep *upstream.Endpoint, path string, timeout time.Duration, limit int) (int, []byte, error) {
	return send(ctx, ep, &upstream.Request{Method: "GET", Path: path, Deadline: time.Now().Add(timeout), Redirects: true}, limit)
}

func send(ctx context.Context, ep *upstream.Endpoint, req *upstream.Request, limit int) (int, []byte, error) {
	var call upstream.Call
	stop := context.AfterFunc(ctx, call.Cancel)
	defer stop()
	resp, err := ep.Do(req, &call)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Release()
	body, err := resp.ReadAll(nil, limit)
	return resp.Status, body, err
}

// short returns an error's text without the packages' prefixes, for a state's reason.
func short(err error) string {
	var up *upstream.Error
	if errors.As(err, &up) {
		text := up.Err.Error()
		if errors.Is(err, syscall.ECONNREFUSED) {
			text = "connection refused"
		}
		return fmt.Sprintf("cannot %s it: %s", up.Phase, text)
	}
	return strings.TrimPrefix(err.Error(), "fleet: ")
}
