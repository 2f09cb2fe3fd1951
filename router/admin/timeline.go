package admin

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"sluice/router/obs"
	"sluice/router/requestlog"
	"sluice/router/worker"
)

// RequestList is the list of requests in Status: those in flight, then the finished ones that the
// router keeps, the newest first, as far as the filter accepts them.
type RequestList struct {
	Requests []Request `json:"requests"`
	Searched int       `json:"searched"` // number of requests to which the filter was applied
	Matched  int       `json:"matched"`  // number of them that it accepts, of which Requests has the first
}

// requestFilter selects requests; zero values accept all.
type requestFilter struct {
	model, worker, key, outcome string
	class, tenant               string        // of admission
	slower                      time.Duration // time to the first token, or in total if there is none, or so far
	limit                       int
}

// outcomes are the values of ?outcome=.
var outcomes = append([]string{"in_flight", "migrated", "retried"}, obs.ModelOutcomes[:]...)

const (
	defaultListed = 50
	// maxRunning bounds the explain records that are searched for requests in flight.
	maxRunning = 200
)

func parseFilter(q url.Values) (f requestFilter, err error) {
	f = requestFilter{model: q.Get("model"), worker: q.Get("worker"), key: q.Get("key"), class: q.Get("class"), tenant: q.Get("tenant"), outcome: q.Get("outcome"), limit: defaultListed}
	if f.outcome != "" && !slices.Contains(outcomes, f.outcome) {
		return f, fmt.Errorf("outcome=%q: want one of %s", f.outcome, strings.Join(outcomes, ", "))
	}
	if v := q.Get("slow_ms"); v != "" {
		ms, err := strconv.ParseFloat(v, 64)
		if err != nil || !(ms >= 0 && ms <= 1e9) { // NaN too
			return f, fmt.Errorf("slow_ms=%q: want a number of milliseconds from 0 to 1e9", v)
		}
		f.slower = time.Duration(ms * float64(time.Millisecond))
	}
	if v := q.Get("limit"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > maxRecent {
			return f, fmt.Errorf("limit=%q: want a number from 1 to %d", v, maxRecent)
		}
		f.limit = n
	}
	return f, nil
}

// timelines returns the number of requests whose timelines are kept.
func (s *Server) timelines() int {
	if s.opt.Timelines == nil {
		return 0
	}
	return s.opt.Timelines.Size()
}

// listRequests returns the requests that the filter accepts. Without timelines, the finished ones
// come from the explain records too, which have neither model nor key, class or tenant.
func (s *Server) listRequests(f requestFilter) *RequestList {
	list := &RequestList{Requests: []Request{}}
	serving := s.serving(f.model)
	for _, rec := range s.opt.Scheduler.Summaries(maxRunning, s.opt.Timelines != nil) {
		q := requestOf(&rec)
		list.add(f, f.acceptsRunning(&q, serving), func() Request { return q })
	}
	for _, e := range s.opt.Timelines.Entries() {
		list.add(f, f.accepts(e), func() Request { return requestOfEntry(e) })
	}
	return list
}

// add counts a request, and adds it if the filter has accepted it and the list has room.
func (l *RequestList) add(f requestFilter, accepted bool, request func() Request) {
	l.Searched++
	if !accepted {
		return
	}
	if l.Matched++; len(l.Requests) < f.limit {
		l.Requests = append(l.Requests, request())
	}
}

// serving returns the ids of the workers that serve a model; nil for every model.
func (s *Server) serving(model string) map[string]bool {
	if model == "" {
		return nil
	}
	ids := map[string]bool{}
	for _, wk := range s.opt.Workers.View().Workers {
		if slices.Contains(wk.Info().Models, model) {
			ids[wk.Spec.ID] = true
		}
	}
	return ids
}

// acceptsRunning filters an explain record. Its model is not known, only the worker that serves it.
func (f *requestFilter) acceptsRunning(q *Request, serving map[string]bool) bool {
	outcome, took := q.Outcome, cmp.Or(q.TTFTMS, q.TotalMS)
	if !q.Done {
		outcome, took = "in_flight", float64(time.Now().UnixMilli()-q.At)
	}
	ranks := []string{q.Prefill, q.Decode, q.Whole}
	return (f.outcome == "" || f.outcome == outcome) && f.key == "" && f.class == "" && f.tenant == "" &&
		(f.worker == "" || slices.ContainsFunc(ranks, func(r string) bool { return onWorker(r, f.worker) })) &&
		(serving == nil || slices.ContainsFunc(ranks, func(r string) bool { return serving[workerOf(r)] })) &&
		(f.slower == 0 || took >= millis(f.slower))
}

// onWorker reports whether a rank, worker/rank, is the one named or belongs to the worker named.
func onWorker(rank, name string) bool { return rank != "" && (rank == name || workerOf(rank) == name) }

// workerOf returns the worker of worker/rank. The worker's id may contain slashes.
func workerOf(rank string) string {
	if i := strings.LastIndexByte(rank, '/'); i >= 0 {
		return rank[:i]
	}
	return rank
}

func (f *requestFilter) accepts(e *requestlog.Entry) bool {
	switch f.outcome {
	case "":
	case "in_flight":
		return false
	case "migrated":
		if e.Migrations == 0 {
			return false
		}
	case "retried":
		if e.Retries == 0 {
			return false
		}
	default:
		if obs.Outcome(e.Status, e.Reason) != f.outcome {
			return false
		}
	}
	return (f.model == "" || e.Model == f.model) && (f.key == "" || e.Key == f.key) &&
		(f.class == "" || e.Class == f.class) && (f.tenant == "" || e.Tenant == f.tenant) &&
		(f.slower == 0 || cmp.Or(e.FirstToken, e.Total) >= f.slower) &&
		(f.worker == "" || slices.ContainsFunc(e.Legs, func(l requestlog.Leg) bool { return onWorker(rankName(l.Worker, l.Rank), f.worker) }))
}

func rankName(id string, rank int) string {
	if id == "" {
		return ""
	}
	return worker.ID{Worker: id, Rank: uint16(rank)}.String()
}

func requestOfEntry(e *requestlog.Entry) Request {
	q := Request{ID: e.ID, At: e.Received.UnixMilli(), Model: e.Model, Key: e.Key, Class: e.Class, Tenant: e.Tenant, Endpoint: e.Endpoint, Stream: e.Stream,
		PromptTokens: e.PromptTokens, Attempts: 1 + e.Retries, Retries: e.Retries, Migrations: e.Migrations, Done: true,
		Status: e.Status, Reason: e.Reason, Outcome: obs.Outcome(e.Status, e.Reason), Reported: e.CachedTokens,
		OutputTokens: max(e.OutputTokens, 0), TTFTMS: millis(e.FirstToken), TotalMS: millis(e.Total), Timeline: true}
	prefill := e.Leg("prefill")
	if prefill != nil {
		q.Prefill, q.Predicted = rankName(prefill.Worker, prefill.Rank), prefill.Predicted
	}
	if l := e.Leg("decode", "whole"); l != nil {
		if l.Kind == "whole" {
			q.Whole = rankName(l.Worker, l.Rank)
		} else {
			q.Decode = rankName(l.Worker, l.Rank)
		}
		if prefill == nil || l.Kind == "whole" {
			q.Predicted = l.Predicted
		}
	}
	return q
}

// Timeline is the response of /admin/v1/timeline: a finished request with the times of its parts.
type Timeline struct {
	Request
	Received      time.Time      `json:"received"`
	Client        string         `json:"client,omitempty"`
	TraceID       string         `json:"trace_id,omitempty"`
	Plan          string         `json:"plan,omitempty"`
	Family        string         `json:"family,omitempty"`
	Fallback      string         `json:"fallback,omitempty"`
	RequestBytes  int            `json:"request_bytes"`
	ResponseBytes int64          `json:"response_bytes"`
	StreamEvents  int64          `json:"stream_events,omitempty"`
	ITLP50        float64        `json:"itl_p50_ms,omitempty"`
	ITLP99        float64        `json:"itl_p99_ms,omitempty"`
	Spans         []TimelineSpan `json:"spans"`                   // by their start
	Dropped       int            `json:"spans_dropped,omitempty"` // legs and choices beyond the bounds
}

// TimelineSpan is one part of a request. Times are relative to when the request was received.
type TimelineSpan struct {
	Name    string  `json:"name"`           // queue, tokenize, choose, prefill leg, decode leg, whole leg, KV transfer, stream
	Leg     string  `json:"leg,omitempty"`  // of a choice
	Rank    string  `json:"rank,omitempty"` // worker/rank
	StartMS float64 `json:"start_ms"`
	TookMS  float64 `json:"took_ms"`
	Outcome string  `json:"outcome,omitempty"`
	Bytes   int64   `json:"bytes,omitempty"`
	// Of the queue: the admission class and tenant, and the place at which the request began to wait,
	// from 1, counting waiting requests of its class and of higher ones.
	Class    string `json:"class,omitempty"`
	Tenant   string `json:"tenant,omitempty"`
	Position int    `json:"position,omitempty"`
}

func (s *Server) timeline(w http.ResponseWriter, r *http.Request) {
	id := cmp.Or(r.PathValue("id"), r.URL.Query().Get("id"))
	if id == "" {
		fail(w, http.StatusBadRequest, "bad_parameter", "the id is missing; want a request's id, as in its X-Request-Id header")
		return
	}
	e := s.opt.Timelines.Find(id)
	if e == nil {
		fail(w, http.StatusNotFound, "unknown_request", s.noTimeline(id))
		return
	}
	answer(w, http.StatusOK, timelineOf(e))
}

func (s *Server) noTimeline(id string) string {
	n := s.timelines()
	if n == 0 {
		return "no timelines are kept: admin.timelines is 0"
	}
	return fmt.Sprintf("the timeline of request %q is not kept: the request has not ended, is not among the last %d, or was left out at more than 100 requests a second", id, n)
}

func timelineOf(e *requestlog.Entry) Timeline {
	t := Timeline{Request: requestOfEntry(e), Received: e.Received.UTC(), Plan: e.Plan, Family: e.Family, Fallback: e.Fallback,
		RequestBytes: e.Bytes, ResponseBytes: e.ResponseBytes, StreamEvents: e.Events, ITLP50: millis(e.ITLP50), ITLP99: millis(e.ITLP99),
		Spans: []TimelineSpan{}, Dropped: e.Dropped}
	if e.Client.IsValid() {
		t.Client = e.Client.String()
	}
	if e.Trace.ID != (requestlog.TraceID{}) {
		t.TraceID = hex.EncodeToString(e.Trace.ID[:])
	}
	add := func(name string, s requestlog.Span) *TimelineSpan {
		t.Spans = append(t.Spans, TimelineSpan{Name: name, StartMS: millis(s.Began.Sub(e.Received)), TookMS: millis(s.Took)})
		return &t.Spans[len(t.Spans)-1]
	}
	if !e.Queue.Began.IsZero() {
		s := add("queue", e.Queue)
		s.Class, s.Tenant, s.Position = e.Class, e.Tenant, e.Position
	}
	if !e.Tokenize.Began.IsZero() {
		add("tokenize", e.Tokenize)
	}
	for i := range e.Choices {
		c := &e.Choices[i]
		s := add("choose", c.Span)
		s.Leg, s.Rank = c.Leg, rankName(c.Worker, c.Rank)
	}
	for i := range e.Legs {
		l := &e.Legs[i]
		s := add(l.Kind+" leg", l.Span)
		s.Rank, s.Outcome = rankName(l.Worker, l.Rank), l.Outcome
	}
	if x := &e.Transfer; x.State != "" {
		s := add("KV transfer", x.Span)
		s.Outcome, s.Bytes = x.State, x.Bytes
	}
	if e.Stream && e.FirstToken > 0 {
		add("stream", requestlog.Span{Began: e.Received.Add(e.FirstToken), Took: max(e.Total-e.FirstToken, 0)})
	}
	slices.SortStableFunc(t.Spans, func(a, b TimelineSpan) int { return cmp.Compare(a.StartMS, b.StartMS) })
	return t
}
