package pd

import (
	"bytes"
	"fmt"
	"net/url"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/worker"
)

// Sessions returns the table of sessions.
func (r *Runner) Sessions() *session.Table { return r.sessions }

// recogniseSession finds the session of the request. It answers with an error and returns false if a
// header names a session by an id that cannot be one.
func (q *request) recogniseSession() bool {
	tenant := q.sessionTenant
	id, from := session.FromHeaders(q.x)
	if from != session.None {
		if wrong := session.CheckID(id); wrong != "" {
			shown := string(id[:min(len(id), 40)])
			if len(id) > len(shown) {
				shown += "…"
			}
			return q.refuseSteering(from.String(), shown, wrong)
		}
	} else if q.req.Endpoint.Disaggregable {
		id, from = session.FromBody(&q.req.Doc, q.settings.Sessions.UserMember)
	}
	switch {
	case from != session.None:
		q.sessionKey, q.sessionFrom = q.r.sessions.KeyOf(tenant, id), from
	case q.req.Endpoint.Kind == front.ResponsesAPI && q.req.Doc.Has(jsonscan.KeyPreviousResponseID):
		previous := jsonscan.Text(q.req.Doc.Raw(jsonscan.KeyPreviousResponseID))
		q.sessionFrom = session.PreviousResponse
		if q.sessionKey = q.r.stored.sessionOf(ownerOf(q.req.Principal), string(previous)); !q.r.sessions.IsOf(q.sessionKey, tenant) {
			q.sessionKey = q.r.sessions.KeyOf(tenant, previous)
		}
	}
	if from == session.SluiceSession || from == session.SessionID {
		// The same rank in every router, from the first request on.
		seed := uint64(0)
		if tenant != "" {
			seed = xxh3.HashString(tenant)
		}
		q.steering.session = xxh3.HashSeed(id, seed) | 1
	}
	return true
}

// beginTurn counts the request as a turn of its session.
func (q *request) beginTurn() {
	if !q.sessionKey.IsZero() && q.req.Endpoint.Disaggregable {
		q.turn = q.r.sessions.Begin(q.sessionKey, q.sessionTenant, q.sessionFrom, session.IsFinal(q.x))
	}
}

// startTurn makes the request's session active. If there is no place for it, startTurn returns the wait for
// one, unless the request cannot wait.
func (q *request) startTurn(canWait bool) *session.Wait {
	if !q.turn.IsSession() {
		return nil
	}
	start := session.Request{Pool: q.pool.Model, Tokens: q.promptTokens(), CannotWait: !canWait, Meter: (*kvMeter)(q)}
	if q.class != nil {
		start.Class = q.class.index
	}
	return q.r.sessions.Start(&q.turn, start)
}

// awaitPlace lets the request wait on hold until its session is active. After sessions.max_wait, half of its
// class's longest wait, or at the latest start that meets its targets, the request waits for a rank alone:
// the limit of active sessions delays requests, and is not a reason to refuse them.
func (q *request) awaitPlace(w *admission.Waiter, place *session.Wait) bool {
	w.Hold, q.place = place, place
	longest := min(place.Longest(), q.class.wait/2)
	if w.Item.Firm {
		longest = min(longest, time.Duration(w.Item.Due-q.r.admission.Now()))
	}
	timer := time.AfterFunc(max(longest, 0), place.Overrun)
	defer timer.Stop()
	return q.enqueue(w)
}

// endPlace ends the wait for a place, if there is one, and notes it in the explain record.
func (q *request) endPlace(how session.WaitEnd) {
	if q.place != nil {
		how, took := q.place.End(how)
		q.place = nil
		q.settings.Scheduler.AddNote(q.id, fmt.Sprintf("session %s waited %s for a place among the active sessions: %s", q.sessionKey, took.Round(time.Millisecond), how))
	}
}

// kvMeter reports the KV of the ranks that compute the prompts of a request's pool.
type kvMeter request

// Capacity implements session.Meter.
func (m *kvMeter) Capacity() session.Capacity {
	ranks := m.plan.Whole
	if m.plan.Family != nil {
		ranks = m.plan.Prefill
	}
	c, known := session.Capacity{Occupancy: -1, Ranks: len(ranks)}, true
	for _, r := range ranks {
		c.Computed += r.Computed.Load()
		c.PerToken += m.settings.Scheduler.TimePerToken(r)
		total, size := r.Worker.Info().TotalBlocks, r.BlockSize()
		if total <= 0 || size <= 0 {
			known = false
			continue
		}
		c.Tokens += int64(total) * int64(size)
		if worker.FeedState(r.Feed.Load()) == worker.FeedLive {
			c.Occupancy = max(c.Occupancy, float64(r.CachedBlocks.Load())/float64(total))
		}
		if u := r.KVUsage(); u > 0 {
			c.Occupancy = max(c.Occupancy, u)
		}
	}
	if !known {
		c.Tokens = 0
	}
	c.PerToken /= time.Duration(max(len(ranks), 1))
	return c
}

// observePrompt tells the session of the prompt.
func (q *request) observePrompt() {
	if q.turn.IsSession() {
		keep := len(q.prompt.Tokens) == 0 || q.poolSummary(q.req.Received).needsApprox
		q.r.sessions.Observe(&q.turn, q.keys, approxBlockTokens, q.promptTokens(), keep)
	}
}

// sessionHint sets what the request's session says to the choice of a leg.
func (q *request) sessionHint(query *schedule.Query) {
	query.Session = q.steering.session
	if !q.sessionKey.IsZero() {
		query.SessionID = q.sessionKey.Short()
		query.SessionRank = q.r.sessions.Rank(&q.turn, query.Leg)
	}
}

// end ends a turn and forgets the blocks that nobody uses any more.
func (r *Runner) endTurn(u *session.Turn, res session.Result) {
	if u.IsSession() {
		r.forget(r.sessions.End(u, res))
	}
}

// forget drops predictions of blocks that only a finished session used. Blocks of ranks with a live
// feed are in the index of facts, where they stay until their engine evicts them; the cost of displacing
// blocks does not count them.
func (r *Runner) forget(f session.Forget) {
	for _, rank := range f.Ranks {
		if len(f.Keys) > 0 {
			r.options().Approx.Forget(rank.Slot, f.Keys, f.Keep)
		}
		if size := rank.BlockSize(); size > 0 && worker.FeedState(rank.Feed.Load()) == worker.FeedLive {
			rank.UnusedBlocks.Add(int64(f.Blocks * approxBlockTokens / size))
		}
	}
}

// finishedSession is the response to the end of a session, whether or not there was one: it says
// nothing of the sessions of others.
var finishedSession = []byte(`{"object":"sluice.session","status":"finished"}` + "\n")

// finishSession serves POST /v1/sessions/{id}/finish.
func (r *Runner) finishSession(x front.Exchange) {
	req := x.Request()
	id, err := url.PathUnescape(req.SessionID)
	wrong := ""
	if err != nil {
		wrong = "it has an invalid percent-escape; want each byte that a path may not have as % and two hexadecimal digits"
	} else {
		wrong = session.CheckID([]byte(id))
	}
	if wrong != "" {
		shown := bytes.ToValidUTF8([]byte(req.SessionID[:min(len(req.SessionID), 40)]), []byte("\ufffd"))
		x.Error(front.BadField, "session_id", fmt.Sprintf("session id %q: %s", shown, wrong), 0)
		return
	}
	tenant, invalid := r.current.Load().tenantOf(x)
	if invalid != nil {
		x.Error(front.BadHeader, "", fmt.Sprintf("header %s: %q: %s", invalid.name, invalid.value, invalid.what), 0)
		return
	}
	r.forget(r.sessions.Finish(r.sessions.KeyOf(tenant, []byte(id))))
	x.ReplyJSON(200, finishedSession)
}
