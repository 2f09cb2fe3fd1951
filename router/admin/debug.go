package admin

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime/pprof"
	"runtime/trace"
	"strconv"
	"strings"
	"time"
)

const (
	// maxProfileSeconds bounds a CPU profile and an execution trace, which slow the router down.
	maxProfileSeconds = 60
	// defaultProfileSeconds is the duration of a CPU profile without ?seconds.
	defaultProfileSeconds = 10
)

// snapshotProfiles are the profiles of runtime/pprof that are a snapshot of the process. The
// command line, which net/http/pprof also serves, is not served: flags may contain secrets.
var snapshotProfiles = []string{"goroutine", "heap", "allocs", "threadcreate", "block", "mutex"}

// profiles lists the profiles.
func (s *Server) profiles(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, map[string]any{"profiles": append([]string{"profile", "trace"}, snapshotProfiles...)})
}

// profile serves one profile in the format of `go tool pprof`, or a trace in that of `go tool
// trace`. ?debug=1 or 2 makes a snapshot profile text; ?seconds= is the duration of the others.
func (s *Server) profile(w http.ResponseWriter, req *http.Request) {
	name := req.PathValue("profile")
	switch name {
	case "profile":
		s.timedProfile(w, req, name, pprof.StartCPUProfile, pprof.StopCPUProfile)
		return
	case "trace":
		s.timedProfile(w, req, name, trace.Start, trace.Stop)
		return
	}
	for _, known := range snapshotProfiles {
		if name == known {
			s.snapshotProfile(w, req, name)
			return
		}
	}
	fail(w, http.StatusNotFound, "not_found", fmt.Sprintf("there is no profile %q; want one of profile, trace, %s", name, strings.Join(snapshotProfiles, ", ")))
}

func (s *Server) snapshotProfile(w http.ResponseWriter, req *http.Request, name string) {
	debug := 0
	if text := req.URL.Query().Get("debug"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n > 2 {
			fail(w, http.StatusBadRequest, "bad_parameter", fmt.Sprintf("debug is %q; want 0, 1 or 2", text))
			return
		}
		debug = n
	}
	setProfileHeaders(w, name, debug > 0)
	_ = pprof.Lookup(name).WriteTo(w, debug) // an error is the client's connection
}

// timedProfile runs a profile that has a start and an end. Only one of a kind runs at a time.
func (s *Server) timedProfile(w http.ResponseWriter, req *http.Request, name string, start func(io.Writer) error, stop func()) {
	seconds := defaultProfileSeconds
	if text := req.URL.Query().Get("seconds"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxProfileSeconds {
			fail(w, http.StatusBadRequest, "bad_parameter", fmt.Sprintf("seconds is %q; want 1 to %d", text, maxProfileSeconds))
			return
		}
		seconds = n
	}
	duration := time.Duration(seconds) * time.Second
	if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(duration + writeTimeout)); err != nil {
		fail(w, http.StatusInternalServerError, "internal", fmt.Sprintf("cannot extend the deadline of the response: %v", err))
		return
	}
	setProfileHeaders(w, name, false)
	if err := start(w); err != nil {
		w.Header().Del("Content-Disposition")
		fail(w, http.StatusConflict, "profile_running", fmt.Sprintf("cannot start the %s: %v", name, err))
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), duration)
	defer cancel()
	<-ctx.Done()
	stop()
}

func setProfileHeaders(w http.ResponseWriter, name string, text bool) {
	if text {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Disposition", fmt.Sprintf("attachment; filename=%q", name))
}
