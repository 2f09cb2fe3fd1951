package pd

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

const (
	peerInfoTimeout   = 2 * time.Second // of one asking
	maxPeerInfoAnswer = 1 << 20         // bytes
	peerInfoRetry     = time.Second     // a rank that could not be asked is not asked again for so long
)

// peerInfoCache are what Askers have learned of prefill ranks. Reading one takes no
// lock; asking is done by one request per rank at a time, others wait for it.
type peerInfoCache struct {
	byRank sync.Map // *worker.Rank -> *fact
}

type peerInfo struct {
	text atomic.Pointer[string] // nil: not known

	mu      sync.Mutex // held while asking
	err     error
	retryAt time.Time // nobody asks before, after err
}

// remove drops what is known of a rank: a pair with it has failed, and its
// engine may be another process by now.
func (f *peerInfoCache) remove(r *worker.Rank) { f.byRank.Delete(r) }

// WorkerRemoved forgets a worker that has left or started anew.
func (r *Runner) WorkerRemoved(w *worker.Worker) {
	for _, rank := range w.Ranks {
		r.peerInfos.remove(rank)
		r.notificationBreakers.remove(rank)
	}
}

// store keeps what a handle told.
func (f *peerInfoCache) store(r *worker.Rank, text []byte) {
	if v, ok := f.byRank.Load(r); ok {
		if have := v.(*peerInfo).text.Load(); have != nil && *have == string(text) {
			return
		}
	}
	entry, learned := new(peerInfo), string(text)
	entry.text.Store(&learned)
	f.byRank.Store(r, entry)
	if r.Removed() { // and was forgotten before
		f.remove(r)
	}
}

// reportEngineID tells the fleet what a hand-over calls prefill's engine: an id that was
// not known there is the sign of a restart. The question was put at the time asked.
func (r *Runner) reportEngineID(p *Handover, sentAt time.Time) {
	if id := p.EngineID; len(id) > 2 && id[0] == '"' {
		r.options().Fleet.ReportEngineID(p.Prefill, id[1:len(id)-1], sentAt)
	}
}

// resolvePeerInfo puts what the family must know of the prefill rank into the pair,
// and asks for it where the family asks.
func (q *request) resolvePeerInfo() prefillEnd {
	fetcher, fetches := q.plan.Family.(PeerInfoFetcher)
	if !fetches {
		if _, learns := q.plan.Family.(PeerInfoLearner); !learns {
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
		if rank.Removed() { // and was forgotten before
			q.r.peerInfos.remove(rank)
		}
	}
	err := q.fetchPeerInfo(fetcher, v.(*peerInfo), base, path)
	if err == nil {
		return prefillDone
	}
	if q.x.ClientGone() {
		q.refuse(front.ClientGone, "the client closed the connection before prefill", 0)
		return prefillAnswered
	}
	q.exclude(rank, excludedError)
	q.noteFallback("no_fact", fmt.Sprintf("%s cannot be used: %v", rank.ID, err))
	if q.refreshCandidates(); q.triesLeft() && q.hasCandidate(q.plan.Prefill) {
		return prefillRetry
	}
	return prefillUnavailable
}

// fetchPeerInfo fills f unless another request has done so meanwhile.
func (q *request) fetchPeerInfo(fetcher PeerInfoFetcher, f *peerInfo, base, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if text := f.text.Load(); text != nil {
		q.handover.PeerInfo = *text
		return nil
	}
	if f.err != nil && time.Now().Before(f.retryAt) {
		return f.err
	}
	var text string
	sentAt := time.Now()
	if text, f.err = q.getPeerInfo(fetcher, base, path); f.err != nil {
		f.retryAt = time.Now().Add(peerInfoRetry)
		return f.err
	}
	q.r.reportEngineID(&q.handover, sentAt)
	f.text.Store(&text)
	q.handover.PeerInfo = text
	return nil
}

func (q *request) getPeerInfo(fetcher PeerInfoFetcher, base, path string) (string, error) {
	ep, err := upstream.NewEndpoint(base, upstream.Options{MaxConns: 1, ConnectTimeout: peerInfoTimeout})
	if err != nil {
		return "", err
	}
	defer ep.Close()
	status, body, err := ep.Get(path, peerInfoTimeout, maxPeerInfoAnswer)
	switch {
	case err != nil:
		return "", err
	case status != 200:
		return "", fmt.Errorf("GET %s%s answered %d; want 200", base, path, status)
	}
	return fetcher.ParsePeerInfo(&q.handover, body)
}
