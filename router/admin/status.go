package admin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"sluice/router/apikey"
	"sluice/router/obs"
	"sluice/router/session"
	"sluice/router/worker"
)

// Status is the response of /admin/v1/status: what one update of the console shows, read at one
// time, so that no two parts of the page disagree. Parts that were not asked for are absent. The list of
// workers, with Fleet and InFlight, is shared by all clients that ask within sharedFor.
type Status struct {
	At       int64    `json:"t"` // milliseconds since 1970
	Stats    Stats    `json:"stats"`
	Compared *Stats   `json:"compared,omitempty"`
	Fleet    Fleet    `json:"fleet"`
	InFlight InFlight `json:"in_flight"`
	Can      Can      `json:"can"`

	Workers   []Worker      `json:"workers,omitempty"`
	Worker    *WorkerDetail `json:"worker,omitempty"` // the one that ?detail= names
	Models    []ModelStatus `json:"models,omitempty"`
	Keys      []KeyStatus   `json:"keys,omitempty"`
	Requests  *RequestList  `json:"requests,omitempty"`
	Request   *RequestPage  `json:"request,omitempty"` // the one that ?request= names
	Transfers any           `json:"transfers,omitempty"`
	Queues    *Queues       `json:"queues,omitempty"`
}

// Queues has what waits in the router, and the sessions.
type Queues struct {
	Admission any `json:"admission,omitempty"` // see Options.Queues
	// Outcomes and TenantOutcomes count how waits have ended since the start, and refusals.
	Outcomes       []obs.AdmissionCount `json:"admission_outcomes,omitempty"`
	TenantOutcomes []obs.AdmissionCount `json:"tenant_outcomes,omitempty"`
	// Sessions counts them; SessionLimits has the limit of each model, and LatestSessions those that
	// were used last.
	Sessions       *SessionCounts     `json:"sessions,omitempty"`
	SessionLimits  []session.PoolView `json:"session_limits,omitempty"`
	LatestSessions []session.View     `json:"latest_sessions,omitempty"`
}

// SessionCounts counts sessions: those in the table, and those that have ended since the start.
type SessionCounts struct {
	Present  int    `json:"present"`
	Finished uint64 `json:"finished"`
	Expired  uint64 `json:"expired"`
	Evicted  uint64 `json:"evicted"`
}

// Fleet counts workers.
type Fleet struct {
	Workers int `json:"workers"`
	Ready   int `json:"ready"`
}

// InFlight counts the legs that this router has placed, by the role of their ranks. It is the sum of
// Rank.Requests over the ranks of the same document.
type InFlight struct {
	Prefill    int64 `json:"prefill"`
	Decode     int64 `json:"decode"`
	Aggregated int64 `json:"aggregated"`
}

// Can says which optional parts this router has.
type Can struct {
	Reload    bool `json:"reload"`
	Keys      bool `json:"keys"`
	Queues    bool `json:"queues"`
	Timelines int  `json:"timelines"` // number of requests with a timeline; 0: none
}

// WorkerDetail has what the page of one worker shows beyond Worker.
type WorkerDetail struct {
	Worker
	MaxModelLen int          `json:"max_model_len,omitempty"` // in tokens
	Adapters    []string     `json:"adapters,omitempty"`      // LoRA adapters among the models
	Ranks       []RankDetail `json:"ranks"`
	// Transfers are the measured transfers from and to the worker's ranks, and the tiers of
	// notifications.
	Transfers any `json:"transfers,omitempty"`
}

// RankDetail has what the page of one worker shows beyond Rank.
type RankDetail struct {
	Rank
	URL    string         `json:"url"`
	ByTier map[string]int `json:"cached_blocks_by_tier,omitempty"` // blocks in the KV index
	Legs   []obs.LegCount `json:"legs"`
}

// RequestPage has what the router knows of one request. A text says why a part is missing.
type RequestPage struct {
	ID         string          `json:"id"`
	Timeline   *Timeline       `json:"timeline"`
	NoTimeline string          `json:"no_timeline,omitempty"`
	Explain    json.RawMessage `json:"explain"` // as /admin/v1/explain has it
	NoExplain  string          `json:"no_explain,omitempty"`
}

// KeyStatus is the usage of an API key since the process started.
type KeyStatus struct {
	Name     string         `json:"name"`
	Models   []string       `json:"models,omitempty"` // that it may use; none: all
	Admitted uint64         `json:"admitted"`
	Limited  uint64         `json:"limited"`
	Tokens   uint64         `json:"tokens"`
	Limits   []apikey.Limit `json:"limits,omitempty"`
}

// Bounds of the lists of one document.
const (
	maxKeys     = 500
	maxModels   = 200
	maxSessions = 50
	// maxTenantCounts bounds the lines of Queues.TenantOutcomes.
	maxTenantCounts = 500
)

// parts are the values of ?parts=.
var parts = []string{"workers", "models", "keys", "requests", "transfers", "queues"}

// status answers with one document for one update of the console.
func (s *Server) status(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	asked, err := parseParts(q.Get("parts"))
	if err == nil {
		err = s.answerStatus(w, q, asked)
	}
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_parameter", err.Error())
	}
}

func parseParts(list string) (map[string]bool, error) {
	asked := map[string]bool{}
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		known := false
		for _, p := range parts {
			known = known || p == name
		}
		if !known {
			return nil, fmt.Errorf("parts=%q has %q; want some of %s", list, name, strings.Join(parts, ","))
		}
		asked[name] = true
	}
	return asked, nil
}

func (s *Server) answerStatus(w http.ResponseWriter, q url.Values, asked map[string]bool) error {
	since, err := parseMillis(q, "since")
	if err != nil {
		return err
	}
	comparedSince, err := parseMillis(q, "compared_since")
	if err != nil {
		return err
	}
	filter, err := parseFilter(q)
	if err != nil {
		return err
	}
	out := Status{At: time.Now().UnixMilli(), Stats: s.statsOf(s.ownSampler, s.opt.Scheduler.Policy(), since),
		Can: Can{Reload: s.opt.Reload != nil, Keys: s.opt.Keyring != nil, Queues: s.opt.Queues != nil || s.opt.Sessions != nil, Timelines: s.timelines()}}
	if s.comparedSampler != nil {
		st := s.statsOf(s.comparedSampler, s.opt.Compared.Name, comparedSince)
		out.Compared = &st
	}
	list := s.addWorkers(&out, asked["workers"], q.Get("detail"))
	if asked["models"] {
		out.Models = s.models.status(s.opt.Workers.View())
	}
	if asked["keys"] {
		out.Keys = s.keys()
	}
	if asked["requests"] {
		out.Requests = s.listRequests(filter)
	}
	if id := q.Get("request"); id != "" {
		out.Request = s.requestPage(id)
	}
	if asked["transfers"] && s.opt.Transfers != nil {
		out.Transfers = s.opt.Transfers()
	}
	if asked["queues"] {
		out.Queues = s.queueStatus()
	}
	if list == nil {
		answer(w, http.StatusOK, &out)
		return nil
	}
	body, err := json.Marshal(&out)
	if err != nil {
		return err
	}
	answerBody(w, body[:len(body)-1], []byte(`,"workers":`), list, []byte("}\n"))
	return nil
}

// parseMillis parses a parameter in milliseconds since 1970; 0 if it is absent.
func parseMillis(q url.Values, name string) (int64, error) {
	v := q.Get(name)
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s=%q: want milliseconds since 1970", name, v)
	}
	return n, nil
}

// addWorkers adds the worker named detail and the counts over all workers, and returns the encoded
// list of workers if it was asked for. The counts are those of the same moment as the list, or else as
// the detail, which may be up to sharedFor later than the list.
func (s *Server) addWorkers(out *Status, list bool, detail string) (encoded []byte) {
	if list {
		d := s.workerList.document(time.Now(), s.workerDocument)
		out.Fleet, out.InFlight, encoded = d.fleet, d.inFlight, d.body
		if detail == "" {
			return encoded
		}
	}
	var fleet Fleet
	var inFlight InFlight
	for _, wk := range s.opt.Workers.View().Workers {
		fleet.Workers++
		if state, _ := wk.State(); state == worker.Ready {
			fleet.Ready++
		}
		if wk.Spec.ID != detail {
			for _, r := range wk.Ranks {
				inFlight.add(wk.Spec.Role, r.Requests.Load())
			}
			continue
		}
		v := s.workerView(wk)
		for i := range v.Ranks {
			inFlight.add(wk.Spec.Role, v.Ranks[i].Requests)
		}
		out.Worker = s.workerDetail(wk, v)
	}
	if !list {
		out.Fleet, out.InFlight = fleet, inFlight
	}
	return encoded
}

func (n *InFlight) add(role worker.Role, requests int64) {
	switch role {
	case worker.Prefill:
		n.Prefill += requests
	case worker.Decode:
		n.Decode += requests
	default:
		n.Aggregated += requests
	}
}

func (s *Server) workerDetail(wk *worker.Worker, v Worker) *WorkerDetail {
	info := wk.Info()
	d := &WorkerDetail{Worker: v, MaxModelLen: info.MaxModelLen, Adapters: info.Adapters}
	for i, r := range wk.Ranks {
		rank := RankDetail{Rank: v.Ranks[i], URL: maskURL(r.URL), Legs: s.opt.Metrics.RankLegs(r.ID)}
		if s.opt.BlocksByTier != nil {
			rank.ByTier = s.opt.BlocksByTier(r)
		}
		d.Ranks = append(d.Ranks, rank)
	}
	if s.opt.Transfers != nil {
		d.Transfers = s.opt.Transfers()
	}
	return d
}

func (s *Server) requestPage(id string) *RequestPage {
	p := &RequestPage{ID: id}
	if e := s.opt.Timelines.Find(id); e != nil {
		t := timelineOf(e)
		p.Timeline = &t
	} else {
		p.NoTimeline = s.noTimeline(id)
	}
	if body, ok := s.opt.Scheduler.Explain(id); ok {
		p.Explain = body
	} else {
		p.NoExplain = s.recordNotFound(id)
	}
	return p
}

func (s *Server) queueStatus() *Queues {
	q := new(Queues)
	if s.opt.Queues != nil {
		q.Admission = s.opt.Queues()
		q.Outcomes, q.TenantOutcomes = s.opt.Metrics.AdmissionCounts()
		q.TenantOutcomes = q.TenantOutcomes[:min(len(q.TenantOutcomes), maxTenantCounts)]
	}
	if s.opt.Sessions != nil {
		o := s.opt.Sessions(maxSessions)
		q.Sessions = &SessionCounts{Present: o.Sessions, Finished: o.Finished, Expired: o.Expired, Evicted: o.Evicted}
		q.SessionLimits, q.LatestSessions = o.Models[:min(len(o.Models), maxModels)], o.Newest
	}
	return q
}

func (s *Server) keys() []KeyStatus {
	out := []KeyStatus{}
	if s.opt.Keyring == nil {
		return out
	}
	for _, k := range s.opt.Keyring.Keys() {
		if len(out) == maxKeys {
			break
		}
		c := k.Counts()
		out = append(out, KeyStatus{Name: k.Name(), Models: k.Models(), Admitted: c.Admitted, Limited: c.Limited, Tokens: c.Tokens, Limits: k.Limits()})
	}
	return out
}
