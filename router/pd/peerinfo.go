package pd

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/pd/family"
	"sluice/router/worker"
)

const (
	peerInfoTimeout   = 2 * time.Second // for one query
	maxPeerInfoAnswer = 1 << 20         // in bytes
	peerInfoRetry     = time.Second     // back-off after a failed query of a rank
)

// peerInfoCache stores what the router has learned about prefill ranks for families that need it.
// Reading takes no lock. One request at a time queries a rank, and others wait for its result.
type peerInfoCache struct {
	byRank sync.Map // *worker.Rank -> *peerInfo
}

type peerInfo struct {
	text atomic.Pointer[string] // nil: unknown

	mu      sync.Mutex // locked during a query
	err     error
	retryAt time.Time // no query before this time after err
}

// remove deletes the entry of a rank. It is called after a failed hand-over with the rank, because
// its engine may be a new process.
func (f *peerInfoCache) remove(r *worker.Rank) { f.byRank.Delete(r) }

// WorkerRemoved forgets a worker that has been removed or restarted.
func (r *Runner) WorkerRemoved(w *worker.Worker) {
	for _, rank := range w.Ranks {
		r.peerInfos.remove(rank)
		r.idRefusals.remove(rank)
		r.notificationBreakers.Remove(rank)
	}
}

// store records what a handle said about a rank.
func (f *peerInfoCache) store(r *worker.Rank, text []byte) {
	if v, ok := f.byRank.Load(r); ok {
		if have := v.(*peerInfo).text.Load(); have != nil && *have == string(text) {
			return
		}
	}
	entry, learned := new(peerInfo), string(text)
	entry.text.Store(&learned)
	f.byRank.Store(r, entry)
	if r.Removed() { // WorkerRemoved may have run before the store
		f.remove(r)
	}
}

// reportEngineID reports the prefill engine's id in a hand-over to the fleet. A new id is a sign of
// a restart. sentAt is when the request that returned the id was sent.
func (r *Runner) reportEngineID(p *family.Handover, sentAt time.Time) {
	if id := p.EngineID; len(id) > 2 && id[0] == '"' {
		r.options().Fleet.ReportEngineID(p.Prefill, id[1:len(id)-1], sentAt)
	}
}

// resolvePeerInfo sets the hand-over's PeerInfo to what the router knows about the prefill rank. If
// it is unknown and the family can fetch it, resolvePeerInfo queries the rank.
func (q *request) resolvePeerInfo() prefillEnd {
	fetcher, fetches := q.plan.Family.(family.PeerInfoFetcher)
	if !fetches {
		if _, learns := q.plan.Family.(family.PeerInfoLearner); !learns {
			return prefillDone
		}
	}
	rank := q.handover.Prefill
	v, ok := q.r.peerInfos.byRank.Load(rank)
	if ok {
		if text := v.(*peerInfo).text.Load(); text != nil {
			q.handover.PeerInfo = *text
			return prefillDone
		}
	}
	if !fetches {
		return prefillDone
	}
	base, path := fetcher.PeerInfoURL(&q.handover)
	if base == "" {
		return prefillDone
	}
	if !ok {
		v, _ = q.r.peerInfos.byRank.LoadOrStore(rank, new(peerInfo))
		if rank.Removed() { // WorkerRemoved may have run before the store
			q.r.peerInfos.remove(rank)
		}
	}
	err := q.fetchPeerInfo(fetcher, v.(*peerInfo), base, path)
	if q.x.ClientGone() { // the query may have taken a while, and nothing has been sent yet
		q.refuse(front.ClientGone, "the client closed the connection before prefill", 0)
		return prefillAnswered
	}
	if err == nil {
		return prefillDone
	}
	q.exclude(rank, excludedError)
	q.noteFallback("peer_info_unavailable", fmt.Sprintf("%s cannot be used: %v", rank.ID, err))
	if q.refreshCandidates(); q.triesLeft() && q.hasCandidate(q.plan.Prefill) {
		return prefillRetry
	}
	return prefillUnavailable
}

// fetchPeerInfo queries the rank and stores the result in f, unless another request has done so.
func (q *request) fetchPeerInfo(fetcher family.PeerInfoFetcher, f *peerInfo, base, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if q.x.ClientGone() {
		return upstream.ErrCancelled
	}
	if text := f.text.Load(); text != nil {
		q.handover.PeerInfo = *text
		return nil
	}
	if f.err != nil && time.Now().Before(f.retryAt) {
		return f.err
	}
	sentAt := time.Now()
	text, err := q.getPeerInfo(fetcher, base, path)
	if errors.Is(err, upstream.ErrCancelled) {
		return err // it says nothing about the rank
	}
	if f.err = err; err != nil {
		f.retryAt = time.Now().Add(peerInfoRetry)
		return err
	}
	q.r.reportEngineID(&q.handover, sentAt)
	f.text.Store(&text)
	q.handover.PeerInfo = text
	return nil
}

// getPeerInfo sends the query. The client's disconnect cancels it.
func (q *request) getPeerInfo(fetcher family.PeerInfoFetcher, base, path string) (string, error) {
	ep, err := upstream.NewEndpoint(base, upstream.Options{MaxConns: 1, ConnectTimeout: peerInfoTimeout})
	if err != nil {
		return "", err
	}
	defer ep.Close()
	call := new(upstream.Call)
	q.x.OnClientGone(call.Cancel)
	defer q.x.OnClientGone(nil)
	resp, err := ep.Do(&upstream.Request{Method: "GET", Path: path, Deadline: time.Now().Add(peerInfoTimeout), Redirects: true}, call)
	if err != nil {
		return "", err
	}
	defer resp.Release()
	body, err := resp.ReadAll(nil, maxPeerInfoAnswer)
	switch {
	case err != nil:
		return "", err
	case resp.Status != 200:
		return "", fmt.Errorf("GET %s%s answered %d; want 200", base, path, resp.Status)
	}
	return fetcher.ParsePeerInfo(&q.handover, body)
}
