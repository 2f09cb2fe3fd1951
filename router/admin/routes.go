package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"sluice/router/discovery"
	"sluice/router/obs"
	"sluice/router/session"
)

// Route is one entry of the route table.
type Route struct {
	Method  string
	Path    string // pattern of http.ServeMux
	Summary string
	public  bool // served without the token, because it contains no data
	serve   func(*Server, http.ResponseWriter, *http.Request)
}

// Routes are all routes of the admin listener; a new route is added only here. A route requires
// the token unless public is set.
var Routes []Route

func init() {
	Routes = append(consoleRoutes(), []Route{
		{"GET", "/admin/v1/router", "which router this is: addresses, configuration file, process id and uptime", false, (*Server).identity},
		{"GET", "/admin/v1/status", "one document for one update of the console; ?parts= some of workers, models, keys, requests, transfers, queues, ?detail= a worker, ?request= an id, ?since=, filters of requests: ?model=, ?worker=, ?key=, ?class=, ?tenant=, ?outcome=, ?slow_ms=, ?limit=", false, (*Server).status},
		{"GET", "/admin/v1/timeline/{id}", "a finished request with the times of its parts", false, (*Server).timeline},
		{"GET", "/admin/v1/timeline", "the same by ?id=", false, (*Server).timeline},
		{"GET", "/admin/v1/workers", "state, load and KV of every worker and rank", false, (*Server).workers},
		{"GET", "/admin/v1/health", "whether the router is ready, what it waits for, and the state of every worker", false, (*Server).health},
		{"GET", "/admin/v1/discovery", "the sources of workers and their errors", false, (*Server).discovery},
		{"GET", "/admin/v1/transfers", "the tiers of transfer notifications with their state and reason, and the measurements between ranks", false, (*Server).transfers},
		{"GET", "/admin/v1/sessions", "the sessions in use, how many are active, and the limit of each model; ?limit= newest sessions", false, (*Server).sessions},
		{"GET", "/admin/v1/queues", "what waits for admission, by pool, class and tenant", false, (*Server).queues},
		{"POST", "/admin/v1/workers/{id}/drain", "stop sending requests to a worker; ?on=false ends the drain", false, (*Server).drain},
		{"GET", "/admin/v1/explain/{id}", "the explain record of a request", false, (*Server).explain},
		{"GET", "/admin/v1/explain", "the same by ?id=", false, (*Server).explain},
		{"GET", "/admin/v1/requests", "the newest requests; ?limit=", false, (*Server).requests},
		{"GET", "/admin/v1/stats", "rates, hit rates and quantiles, now and over time; ?since= milliseconds", false, (*Server).stats},
		{"GET", "/admin/v1/compare", "the same of the router compared with", false, (*Server).comparedStats},
		{"GET", "/admin/v1/config", "the configuration, secrets masked", false, (*Server).config},
		{"GET", "/admin/v1/events", "decisions, ends and changes of state as server-sent events", false, (*Server).events},
		{"GET", "/admin/v1/record", "a recording, from now on until the connection ends; see sluice record", false, (*Server).record},
		{"POST", "/admin/v1/reload", "apply what can change of the configuration file; lists whether each changed field was applied; ?dry_run=true changes nothing", false, (*Server).reload},
		{"POST", "/admin/v1/restart", "replace this process by a new one of the same program file, which inherits the listeners; answers when the new one serves", false, (*Server).restart},
		{"GET", "/debug/pprof/{$}", "the names of the profiles", false, (*Server).profiles},
		{"GET", "/debug/pprof/{profile}", "a profile of the process: profile (CPU) and trace for ?seconds=, goroutine, heap, allocs, threadcreate, block, mutex; ?debug=1 as text", false, (*Server).profile},
		{"GET", "/metrics", "Prometheus metrics", false, (*Server).metrics},
	}...)
}

// renamedPaths are former paths. They redirect to the present ones for one release.
var renamedPaths = map[string]string{"/admin/v1/twin": "/admin/v1/compare"}

func (s *Server) mux() *http.ServeMux {
	mux := http.NewServeMux()
	for _, r := range Routes {
		h := func(w http.ResponseWriter, req *http.Request) { r.serve(s, w, req) }
		if !r.public {
			h = s.guard.requireToken(h)
		}
		mux.HandleFunc(r.Method+" "+r.Path, h)
		wrong := func(w http.ResponseWriter, req *http.Request) { wrongMethod(w, req, r.Method) }
		if !r.public {
			wrong = s.guard.requireToken(wrong)
		}
		mux.HandleFunc(r.Path, wrong)
	}
	for old, present := range renamedPaths {
		mux.HandleFunc("GET "+old, s.guard.requireToken(func(w http.ResponseWriter, req *http.Request) {
			target := url.URL{Path: present, RawQuery: req.URL.RawQuery}
			http.Redirect(w, req, target.String(), http.StatusPermanentRedirect)
		}))
	}
	// Unknown paths and methods also require the token, so that they reveal nothing.
	mux.HandleFunc("/", s.guard.requireToken(func(w http.ResponseWriter, req *http.Request) {
		var paths []string
		for _, r := range Routes {
			if !r.public {
				paths = append(paths, r.Method+" "+r.Path)
			}
		}
		fail(w, http.StatusNotFound, "unknown_route", "no such route; there are: "+strings.Join(paths, ", "))
	}))
	return mux
}

func wrongMethod(w http.ResponseWriter, r *http.Request, want string) {
	allow := want
	if want == http.MethodGet {
		allow += ", " + http.MethodHead
	}
	w.Header().Set("Allow", allow)
	fail(w, http.StatusMethodNotAllowed, "wrong_method", fmt.Sprintf("method %s is not allowed here; use %s", r.Method, want))
}

func (s *Server) drain(w http.ResponseWriter, r *http.Request) {
	on := true
	if v := r.URL.Query().Get("on"); v != "" {
		var err error
		if on, err = strconv.ParseBool(v); err != nil {
			fail(w, http.StatusBadRequest, "bad_parameter", fmt.Sprintf("on=%q is not a boolean; want true or false", v))
			return
		}
	}
	id := r.PathValue("id")
	for _, wk := range s.opt.Workers.View().Workers {
		if wk.Spec.ID != id {
			continue
		}
		if err := s.opt.Workers.Drain(id, on); err != nil {
			fail(w, http.StatusConflict, "cannot_drain", err.Error())
			return
		}
		s.workerList.changed()
		s.log.Info("drain requested by the admin API", "worker", id, "draining", on)
		answer(w, http.StatusOK, s.workerView(wk))
		return
	}
	fail(w, http.StatusNotFound, "unknown_worker", fmt.Sprintf("no worker %q", id))
}

func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if id == "" {
		id = r.URL.Query().Get("id")
	}
	if id == "" {
		fail(w, http.StatusBadRequest, "bad_parameter", "the id is missing; want a request's id, as in its X-Request-Id header")
		return
	}
	body, ok := s.opt.Scheduler.Explain(id)
	if !ok {
		fail(w, http.StatusNotFound, "unknown_request", s.recordNotFound(id))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(body, '\n'))
}

func (s *Server) recordNotFound(id string) string {
	n := s.opt.Scheduler.RecordCapacity()
	if n == 0 {
		return "no records are kept: schedule.explain is off"
	}
	return fmt.Sprintf("request %q is not among the last %d that this router has placed", id, n)
}

const maxRecent = 500

// limitOf returns the query parameter limit, 50 if there is none. It answers with an error and returns
// false if it is invalid.
func limitOf(w http.ResponseWriter, r *http.Request) (limit int, ok bool) {
	v := r.URL.Query().Get("limit")
	if v == "" {
		return 50, true
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > maxRecent {
		fail(w, http.StatusBadRequest, "bad_parameter", fmt.Sprintf("limit=%q: want a number from 1 to %d", v, maxRecent))
		return 0, false
	}
	return n, true
}

func (s *Server) sessions(w http.ResponseWriter, r *http.Request) {
	limit, ok := limitOf(w, r)
	switch {
	case !ok:
	case s.opt.Sessions == nil:
		answer(w, http.StatusOK, session.Overview{Models: []session.PoolView{}, Newest: []session.View{}})
	default:
		answer(w, http.StatusOK, s.opt.Sessions(limit))
	}
}

func (s *Server) requests(w http.ResponseWriter, r *http.Request) {
	limit, ok := limitOf(w, r)
	if !ok {
		return
	}
	recs := s.opt.Scheduler.Recent(limit)
	out := make([]Request, 0, len(recs))
	for i := range recs {
		out = append(out, requestOf(&recs[i]))
	}
	answer(w, http.StatusOK, map[string]any{"requests": out})
}

func (s *Server) metrics(w http.ResponseWriter, r *http.Request) {
	s.opt.Metrics.WriteAs(w, r.Header.Get("Accept"), func(contentType string) { w.Header().Set("Content-Type", contentType) })
}

func (s *Server) discovery(w http.ResponseWriter, r *http.Request) {
	sources := []discovery.State{}
	if s.opt.Discovery != nil {
		sources = s.opt.Discovery()
	}
	answer(w, http.StatusOK, map[string]any{"sources": sources})
}

// queues answers with what waits for admission.
func (s *Server) queues(w http.ResponseWriter, _ *http.Request) {
	var view any = struct{}{}
	if s.opt.Queues != nil {
		view = s.opt.Queues()
	}
	answer(w, http.StatusOK, view)
}

func (s *Server) transfers(w http.ResponseWriter, r *http.Request) {
	var view any = map[string]any{"active": "http", "tiers": []string{}, "pairs": []string{}} // for a router without KV transfers
	if s.opt.Transfers != nil {
		view = s.opt.Transfers()
	}
	answer(w, http.StatusOK, view)
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	if s.opt.Health == nil {
		fail(w, http.StatusNotFound, "no_health", "this router has no health page")
		return
	}
	status, body := s.opt.Health()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(body)
}

func (s *Server) config(w http.ResponseWriter, r *http.Request) {
	if s.opt.Config == nil {
		fail(w, http.StatusNotFound, "no_config", "this router shows no configuration")
		return
	}
	v, err := masked(s.opt.Config())
	if err != nil {
		fail(w, http.StatusInternalServerError, "internal", err.Error())
		return
	}
	answer(w, http.StatusOK, v)
}

// showOff replaces the durations that stand for "off" in the configuration's structs by the word of the file.
func showOff(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			v[k] = showOff(x)
		}
	case []any:
		for i, x := range v {
			v[i] = showOff(x)
		}
	case string:
		if v == time.Duration(-1).String() {
			return "off"
		}
	}
	return v
}

// masked returns v as plain JSON values with the keys of the configuration file, with every secret
// masked.
func masked(v any) (any, error) {
	b, err := yaml.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("admin: cannot show the configuration: %w", err)
	}
	var plain any
	if err := yaml.Unmarshal(b, &plain); err != nil {
		return nil, errors.New("admin: cannot show the configuration: its YAML cannot be parsed again")
	}
	plain = showOff(maskValue(plain))
	if _, err := json.Marshal(plain); err != nil {
		return nil, fmt.Errorf("admin: cannot show the configuration: %w", err)
	}
	return plain, nil
}

func maskValue(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if obs.IsSecret(k) {
				v[k] = maskAll(x)
			} else {
				v[k] = maskValue(x)
			}
		}
	case []any:
		for i := range v {
			v[i] = maskValue(v[i])
		}
	case string:
		return maskURL(v)
	}
	return v
}

// maskAll masks every non-empty string in a value. Numbers and empty strings stay visible.
func maskAll(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			v[k] = maskAll(x)
		}
	case []any:
		for i := range v {
			v[i] = maskAll(v[i])
		}
	case string:
		if v != "" {
			return obs.MaskedValue
		}
	}
	return v
}

// maskURL masks the password and the query of a URL, and a user name without a password, which may
// be a token.
func maskURL(s string) string {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		return s
	}
	if address, _, hasQuery := strings.Cut(rest, "?"); hasQuery {
		rest = address + "?" + obs.MaskedValue
	}
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	if at := strings.LastIndexByte(rest[:end], '@'); at >= 0 {
		user, _, hasPassword := strings.Cut(rest[:at], ":")
		if hasPassword {
			user += ":" + obs.MaskedValue
		} else {
			user = obs.MaskedValue
		}
		rest = user + rest[at:]
	}
	return scheme + "://" + rest
}
