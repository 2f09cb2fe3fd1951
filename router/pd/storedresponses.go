package pd

import (
	"bytes"
	linked "container/list"
	"fmt"
	"sync"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

const (
	// maxStored bounds how many responses the router remembers. When the table is full, the
	// oldest entry of a client with more than its share goes first (see evict).
	maxStored = 1 << 16
	// storedFor is how long a response is remembered. Engines keep responses until they end.
	storedFor = 24 * time.Hour
)

// storedResponses remembers which rank answered /v1/responses with which id, and whose
// request it was. Engines store responses in their own memory and give them to anybody who
// knows the id; so the router finds the engine here, and refuses other clients. Nothing of
// it is written to disk or outlives the router. Safe for concurrent use.
type storedResponses struct {
	mu     sync.Mutex
	byID   map[string]*linked.Element // of *storedResponse, by id
	ages   linked.List                // all, the oldest in front
	owners map[string]*linked.List    // of *storedResponse by owner, the oldest in front; none is empty
	max    int                        // [maxStored]
}

type storedResponse struct {
	id, owner string // owner: the name of the client's key, "" where the router requires none
	rank      *worker.Rank
	until     time.Time
	own       *linked.Element // the entry's place in its owner's list
}

// add remembers a response. An id that another client's response has stays that client's.
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

// evict makes room for a response of owner's in a full table. A client that has its share
// of the table or more loses its own oldest response; otherwise the client with the most
// responses does. So no client pushes another's responses out by making many. Called with
// mu.
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

// find gives the rank that stored a response of owner's; nil: there is none, or it is
// another's.
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

// forget drops a response of owner's.
func (s *storedResponses) forget(owner, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byID[id]; e != nil && e.Value.(*storedResponse).owner == owner {
		s.remove(e)
	}
}

// expire drops what is too old. Called with mu.
func (s *storedResponses) expire(now time.Time) {
	for e := s.ages.Front(); e != nil && !now.Before(e.Value.(*storedResponse).until); e = s.ages.Front() {
		s.remove(e)
	}
}

// remove drops an entry. Called with mu.
func (s *storedResponses) remove(e *linked.Element) {
	r := e.Value.(*storedResponse)
	delete(s.byID, r.id)
	s.ages.Remove(e)
	own := s.owners[r.owner]
	if own.Remove(r.own); own.Len() == 0 {
		delete(s.owners, r.owner)
	}
}

// ownerOf is whose responses a request may name.
func ownerOf(pass front.Principal) string {
	if pass == nil {
		return ""
	}
	return pass.Name()
}

// declinesStore reports whether the client asked the engine not to store the response
// ("store": false): the engine has nothing that a later request could name.
func (q *request) declinesStore() bool {
	if q.x.Endpoint.Kind != front.ResponsesAPI {
		return false
	}
	v, ok, err := jsonscan.Find(q.x.Doc.Body, "store")
	return err == nil && ok && v.Kind == jsonscan.Bool && q.x.Doc.Body[v.Start] == 'f'
}

// rememberResponse records that rank answered a request of /v1/responses with this body, of
// which the beginning is enough.
func (q *request) rememberResponse(body []byte, rank *worker.Rank) {
	if q.x.Endpoint.Kind != front.ResponsesAPI || q.declinesStore() {
		return
	}
	q.r.stored.add(ownerOf(q.x.Principal()), responseID(body), rank, time.Now())
}

// responseID is the id of a response object of which body is the beginning, "" where it is
// not there. Engines write it first; elsewhere it is found in a whole body only. The size
// of a chunk may stand before the object.
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
	return string(jsonscan.Unquote(nil, body[v.Start:v.End]))
}

// ResponseID implements front.Storer.
func (s *streamState) ResponseID(id string) {
	if s.endpoint.Kind == front.ResponsesAPI && !s.unstored {
		s.r.stored.add(ownerOf(s.pass), id, s.rank, time.Now())
	}
}

// routeToStored has a request that goes on from a stored response run on the rank that
// stored it. It answers and returns false where that cannot be.
func (q *request) routeToStored() bool {
	if q.x.Endpoint.Kind != front.ResponsesAPI || !q.x.Doc.Has(jsonscan.KeyPreviousResponseID) {
		return true
	}
	id := string(jsonscan.Unquote(nil, q.x.Doc.Raw(jsonscan.KeyPreviousResponseID)))
	rank := q.r.stored.find(ownerOf(q.x.Principal()), id, time.Now())
	switch {
	case rank != nil:
		q.steering.stored = rank
		return q.narrowToStored(id)
	case q.x.Principal() == nil:
		return true // it may be from before a restart of the router: the engine knows
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

// narrowToStored leaves the plan's legs but prefill to the rank that stored the response.
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

// serveStored passes a request about a stored response on to the engine that stored it.
func (r *Runner) serveStored(x *front.Exchange) {
	owner, id := ownerOf(x.Principal()), x.Stored.ID
	rank := r.stored.find(owner, id, time.Now())
	if rank == nil && x.Principal() == nil {
		rank = r.soleRank()
	}
	if rank == nil {
		x.Error(front.UnknownResponse, "response_id", unknownResponse(id), 0)
		return
	}
	opt := r.options()
	call := new(upstream.Call)
	x.OnClientGone(call.Cancel)
	resp, err := opt.Fleet.Endpoint(rank).Do(&upstream.Request{
		Method:   x.Stored.Method,
		Path:     x.Stored.Path(),
		Fields:   append(x.ForwardFields(nil), upstream.Field{Name: "X-Request-Id", Value: x.RequestID}, x.HopField()),
		Deadline: time.Now().Add(opt.Timeouts.Decode),
	}, call)
	x.OnClientGone(nil)
	if err != nil {
		storedErrorReason(x, rank, call, err)
		return
	}
	x.SetHeader("X-Sluice-Worker", rank.ID.Worker)
	if resp.Status < 400 && (isEventStream(resp) || resp.ContentLength < 0 || resp.ContentLength > maxAnswer) {
		x.Relay(resp, call, front.RelayHooks{})
		return
	}
	defer resp.Release()
	x.OnClientGone(call.Cancel)
	body, err := resp.ReadAll(nil, maxAnswer)
	x.OnClientGone(nil)
	if err != nil {
		storedErrorReason(x, rank, call, err)
		return
	}
	if x.Stored.Method == "DELETE" && resp.Status < 300 {
		r.stored.forget(owner, id)
	}
	body = redactHandle(body)
	relay.RedactInPlace(body, resp.Status)
	x.Reply(resp, body)
}

func storedErrorReason(x *front.Exchange, rank *worker.Rank, call *upstream.Call, err error) {
	if call.Cancelled() {
		x.Error(front.ClientGone, "", "the client closed the connection before the answer", 0)
		return
	}
	x.Error(classify(err).reason, "", fmt.Sprintf("%s, which stored the response, failed: %s", rank.ID, upstream.ClientMessage(err)), 0)
}

// soleRank is the one rank that can have stored a response, nil where there are several.
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
