package pd

import (
	"bytes"
	linked "container/list"
	"fmt"
	"sync"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/redact"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/pd/family"
	"sluice/router/requestlog"
	"sluice/router/session"
	"sluice/router/worker"
)

const (
	// maxStored bounds the number of responses that the router remembers. If the table is full,
	// evict first removes the oldest entry of a client that exceeds its share.
	maxStored = 1 << 16
	// storedFor is how long the router remembers a response. Engines keep responses until the
	// engine process ends.
	storedFor = 24 * time.Hour
)

// storedResponses remembers, for each response id of /v1/responses, the rank that stored the
// response and the client that owns it. Engines store responses in their own memory and serve them
// to any client that knows the id. The router therefore looks the engine up here and refuses other
// clients. The table exists in memory only and does not survive a restart of the router. It is safe
// for concurrent use.
type storedResponses struct {
	mu     sync.Mutex
	byID   map[string]*linked.Element // of *storedResponse, by response id
	ages   linked.List                // all entries of *storedResponse, oldest first
	owners map[string]*linked.List    // each owner's *storedResponse entries, oldest first; no list is empty
	max    int                        // maximum number of entries; add sets it to maxStored if it is 0
}

type storedResponse struct {
	id, owner string // owner is the name of the client's API key, "" if the router requires no key
	rank      *worker.Rank
	until     time.Time
	session   session.Key     // of the request that it answers; zero if it had none
	charged   int             // tokens that a background response was charged before it was computed; 0: none
	own       *linked.Element // the entry's element in its owner's list
}

// setSession remembers the session of a response of owner.
func (s *storedResponses) setSession(owner, id string, k session.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byID[id]; e != nil && e.Value.(*storedResponse).owner == owner {
		e.Value.(*storedResponse).session = k
	}
}

// sessionOf returns the session of a response, zero if owner has no such response.
func (s *storedResponses) sessionOf(owner, id string) session.Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byID[id]; e != nil && e.Value.(*storedResponse).owner == owner {
		return e.Value.(*storedResponse).session
	}
	return session.Key{}
}

// add remembers a response. If another client already owns the id, add changes nothing.
func (s *storedResponses) add(owner, id string, rank *worker.Rank, now time.Time) {
	if id == "" || len(id) > 128 || rank == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID == nil {
		s.byID, s.owners = make(map[string]*linked.Element), make(map[string]*linked.List)
	}
	if s.max == 0 {
		s.max = maxStored
	}
	s.expire(now)
	if e := s.byID[id]; e != nil {
		if e.Value.(*storedResponse).owner != owner {
			return
		}
		s.remove(e)
	}
	for s.ages.Len() >= s.max {
		s.evict(owner)
	}
	own := s.owners[owner]
	if own == nil {
		own = new(linked.List)
		s.owners[owner] = own
	}
	r := &storedResponse{id: id, owner: owner, rank: rank, until: now.Add(storedFor)}
	r.own = own.PushBack(r)
	s.byID[id] = s.ages.PushBack(r)
}

// evict removes one entry from a full table to admit a response of owner. If owner has reached its
// equal share of the table, its own oldest response goes; otherwise the oldest response of the
// client with the most responses goes. A client therefore cannot displace other clients' responses
// by creating many. The caller holds mu.
func (s *storedResponses) evict(owner string) {
	victim, clients := s.owners[owner], len(s.owners)
	if victim == nil {
		clients++
	}
	if victim == nil || victim.Len() < max(s.max/clients, 1) {
		for _, l := range s.owners {
			if victim == nil || l.Len() > victim.Len() {
				victim = l
			}
		}
	}
	s.remove(s.byID[victim.Front().Value.(*storedResponse).id])
}

// find returns the rank that stored the response. It returns nil if owner has no such response or
// the rank has been removed.
func (s *storedResponses) find(owner, id string, now time.Time) *worker.Rank {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire(now)
	e := s.byID[id]
	if e == nil {
		return nil
	}
	r := e.Value.(*storedResponse)
	switch {
	case r.owner != owner:
		return nil
	case r.rank.Removed():
		s.remove(e)
		return nil
	}
	return r.rank
}

// charge records what a background response of owner was charged before it was computed.
func (s *storedResponses) charge(owner, id string, tokens int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byID[id]; e != nil && e.Value.(*storedResponse).owner == owner {
		e.Value.(*storedResponse).charged = tokens
	}
}

// removeCharge removes what charge recorded and returns it: the caller corrects it. It returns 0 if
// there is nothing to correct.
func (s *storedResponses) removeCharge(owner, id string) (tokens int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byID[id]; e != nil && e.Value.(*storedResponse).owner == owner {
		r := e.Value.(*storedResponse)
		tokens, r.charged = r.charged, 0
	}
	return tokens
}

// forget removes a response that owner owns.
func (s *storedResponses) forget(owner, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byID[id]; e != nil && e.Value.(*storedResponse).owner == owner {
		s.remove(e)
	}
}

// expire removes the entries that have reached their time limit. The caller holds mu.
func (s *storedResponses) expire(now time.Time) {
	for e := s.ages.Front(); e != nil && !now.Before(e.Value.(*storedResponse).until); e = s.ages.Front() {
		s.remove(e)
	}
}

// remove removes one entry. The caller holds mu.
func (s *storedResponses) remove(e *linked.Element) {
	r := e.Value.(*storedResponse)
	delete(s.byID, r.id)
	s.ages.Remove(e)
	own := s.owners[r.owner]
	if own.Remove(r.own); own.Len() == 0 {
		delete(s.owners, r.owner)
	}
}

// ownerOf returns the owner name under which a request may store and find responses.
func ownerOf(principal front.Principal) string {
	if principal == nil {
		return ""
	}
	return principal.Name()
}

// declinesStore reports whether the client asked the engine not to store the response ("store":
// false). A later request cannot name such a response.
func (q *request) declinesStore() bool {
	if q.req.Endpoint.Kind != front.ResponsesAPI {
		return false
	}
	v, ok, err := jsonscan.Find(q.req.Doc.Body, "store")
	return err == nil && ok && v.Kind == jsonscan.Bool && q.req.Doc.Body[v.Start] == 'f'
}

// rememberResponse records that rank answered a /v1/responses request with body. body may be only
// the beginning of the response.
func (q *request) rememberResponse(body []byte, rank *worker.Rank) {
	if q.req.Endpoint.Kind != front.ResponsesAPI || q.declinesStore() {
		return
	}
	id := responseID(body)
	q.r.stored.add(ownerOf(q.req.Principal), id, rank, time.Now())
	if !q.sessionKey.IsZero() {
		q.r.stored.setSession(ownerOf(q.req.Principal), id, q.sessionKey)
	}
}

// responseID returns the id of the response object that starts in body, or "" if body does not
// contain it. Engines write the id as the first member; an id at another position is found only if
// body is complete. A chunk size may precede the object.
func responseID(body []byte) string {
	if at := bytes.IndexByte(body, '{'); at > 0 && at < 20 {
		body = body[at:]
	}
	if rest, ok := bytes.CutPrefix(body, []byte(`{"id":"`)); ok {
		if end := bytes.IndexByte(rest, '"'); end >= 0 && bytes.IndexByte(rest[:end], '\\') < 0 {
			return string(rest[:end])
		}
	}
	v, ok, err := jsonscan.Find(body, "id")
	if err != nil || !ok || v.Kind != jsonscan.String {
		return ""
	}
	return string(jsonscan.Text(body[v.Start:v.End]))
}

// ResponseID stores the id of a streamed response. It implements front.ResponseIDObserver.
func (s *streamState) ResponseID(id string) {
	if s.endpoint.Kind == front.ResponsesAPI && !s.unstored {
		s.settings.r.stored.add(ownerOf(s.principal), id, s.rank, time.Now())
		if k := s.turn.Key(); !k.IsZero() {
			s.settings.r.stored.setSession(ownerOf(s.principal), id, k)
		}
	}
}

// routeToStored restricts a request that continues a stored response to the rank that stored it. It
// answers with an error and returns false if that rank cannot run the request.
func (q *request) routeToStored() bool {
	if q.req.Endpoint.Kind != front.ResponsesAPI || !q.req.Doc.Has(jsonscan.KeyPreviousResponseID) {
		return true
	}
	id := string(jsonscan.Text(q.req.Doc.Raw(jsonscan.KeyPreviousResponseID)))
	rank := q.r.stored.find(ownerOf(q.req.Principal), id, time.Now())
	switch {
	case rank != nil:
		q.steering.stored = rank
		return q.narrowToStored(id)
	case q.req.Principal == nil:
		return true // The response may predate a restart of the router; only the engine knows.
	}
	q.refuseParam(front.UnknownResponse, "previous_response_id", unknownResponse(id), 0)
	return false
}

func unknownResponse(id string) string {
	if len(id) > 64 {
		id = id[:64] + "…"
	}
	return fmt.Sprintf("response %q is not known here: it was not stored, is no longer remembered, or its worker has left", id)
}

// narrowToStored restricts every leg of the plan except prefill to the rank that stored the
// response.
func (q *request) narrowToStored(id string) bool {
	p := &q.plan
	for _, ranks := range [...]*[]*worker.Rank{&p.Decode, &p.Whole} {
		if len(*ranks) == 0 {
			continue
		}
		if *ranks = filterRanks(&q.steering, *ranks); len(*ranks) == 0 {
			rank := q.steering.stored
			q.refuse(front.NoWorker, fmt.Sprintf("worker %s, which stored response %q, cannot take this request now", rank.ID.Worker, id), time.Second)
			return false
		}
	}
	return true
}

// serveStored forwards a request about a stored response to the engine that stored it.
func (r *Runner) serveStored(x front.Exchange) {
	req := x.Request()
	owner, id := ownerOf(req.Principal), req.Stored.ID
	rank := r.stored.find(owner, id, time.Now())
	if rank == nil && req.Principal == nil {
		rank = r.soleRank()
	}
	if rank == nil {
		x.Error(front.UnknownResponse, "response_id", unknownResponse(id), 0)
		return
	}
	opt := r.options()
	call := new(upstream.Call)
	s := beginStored(opt.RequestLog, x, rank)
	x.OnClientGone(call.Cancel)
	resp, err := opt.Fleet.Endpoint(rank).Do(&upstream.Request{
		Method:   req.Stored.Method,
		Path:     req.Stored.Path(),
		Fields:   withTraceparent(append(x.ForwardFields(nil), upstream.Field{Name: "X-Request-Id", Value: req.RequestID}, front.HopField(x)), s.entry, s.leg),
		Deadline: time.Now().Add(opt.Timeouts.Decode),
	}, call)
	x.OnClientGone(nil)
	if err != nil {
		s.fail(x, rank, call, err)
		return
	}
	x.SetHeader("X-Sluice-Worker", rank.ID.Worker)
	s.status = resp.Status
	if resp.Status < 400 && (isEventStream(resp) || resp.ContentLength < 0 || resp.ContentLength > maxAnswer) {
		s.relay(x, resp, call)
		return
	}
	defer resp.Release()
	x.OnClientGone(call.Cancel)
	body, err := resp.ReadAll(nil, maxAnswer)
	x.OnClientGone(nil)
	if err != nil {
		s.fail(x, rank, call, err)
		return
	}
	if resp.Status == 200 {
		r.adjustCharge(req.Principal, id, body)
	}
	if req.Stored.Method == "DELETE" && resp.Status < 300 {
		r.stored.forget(owner, id)
	}
	body = family.RedactHandle(body)
	redact.InPlace(body, resp.Status)
	x.Reply(resp, body)
	s.finish("ok", requestlog.Outcome{Status: resp.Status, ResponseBytes: int64(len(body))})
}

// storedEntry is the entry of a request about a stored response in the request log. It is the
// front.StreamHandler of one that is relayed.
type storedEntry struct {
	entry    *requestlog.Entry // nil: there is no request log
	leg      int
	received time.Time
	began    time.Time // of the call
	status   int       // of the engine's answer
}

// beginStored begins the entry of a request that goes to rank now.
func beginStored(log *requestlog.Log, x front.Exchange, rank *worker.Rank) *storedEntry {
	s := &storedEntry{leg: requestlog.NoLeg}
	if log == nil {
		return s
	}
	req := x.Request()
	r := requestlog.Request{
		ID: req.RequestID, Method: req.Stored.Method, Endpoint: req.Endpoint.Path, Client: req.ClientIP, Received: req.Received,
		Traceparent: x.Header("Traceparent"), Tracestate: x.Header("Tracestate"),
	}
	if p := req.Principal; p != nil {
		r.Key = p.Name()
	}
	s.entry, s.received, s.began = log.Begin(r), req.Received, time.Now()
	s.leg = s.entry.StartLeg("stored", rank.ID.Worker, int(rank.ID.Rank), -1, s.began)
	s.entry.SetLegEngine(s.leg, rank.URL, rank.Worker.Info().Engine)
	req.Reported = true // every end of the request finishes the entry
	return s
}

// relay passes the engine's answer on as it arrives. Ended finishes the entry.
func (s *storedEntry) relay(x front.Exchange, resp *upstream.Response, call *upstream.Call) {
	if s.entry == nil {
		x.Relay(resp, call, front.RelayHooks{})
		return
	}
	if isEventStream(resp) {
		s.entry.SetStream()
	}
	x.Relay(resp, call, front.RelayHooks{Handler: s})
}

// FirstToken implements front.StreamHandler.
func (s *storedEntry) FirstToken() {}

// NextEngine implements front.StreamHandler: no other engine has the response.
func (s *storedEntry) NextEngine(relay.Interruption, front.ClientGoneNotifier) (*upstream.Response, *upstream.Call) {
	return nil, nil
}

// Ended implements front.StreamHandler.
func (s *storedEntry) Ended(res relay.Result) {
	out := requestlog.Outcome{Status: s.status, Events: res.Events, ResponseBytes: res.Bytes}
	outcome := "ok"
	if res.Cause != relay.Completed {
		outcome = res.Cause.String()
		out.Reason = outcome
	}
	s.finish(outcome, out)
}

// fail answers with the failure of the engine's call and finishes the entry.
func (s *storedEntry) fail(x front.Exchange, rank *worker.Rank, call *upstream.Call, err error) {
	reason, message := classify(err).reason, fmt.Sprintf("%s, which stored the response, failed: %s", rank.ID, upstream.ClientMessage(err))
	if call.Cancelled() {
		reason, message = front.ClientGone, "the client closed the connection before the answer"
	}
	x.Error(reason, "", message, 0)
	s.finish(string(reason), requestlog.Outcome{Status: reason.Status(), Reason: string(reason)})
}

// finish finishes the entry. The engine's counts of tokens belong to the request that made the response.
func (s *storedEntry) finish(outcome string, out requestlog.Outcome) {
	out.Total, out.CachedTokens, out.OutputTokens = time.Since(s.received), -1, -1
	s.entry.EndLeg(s.leg, outcome, time.Since(s.began))
	s.entry.Finish(out, 0)
}

// soleRank returns the only rank that can have stored a response. It returns nil if there are
// several.
func (r *Runner) soleRank() (only *worker.Rank) {
	for _, w := range r.options().Fleet.View().Workers {
		if w.Spec.Role == worker.Prefill {
			continue
		}
		if only != nil || len(w.Ranks) != 1 {
			return nil
		}
		only = w.Ranks[0]
	}
	return only
}
