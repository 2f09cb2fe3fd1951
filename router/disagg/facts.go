package disagg

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
	factTimeout = 2 * time.Second // of one asking
	factAnswer  = 1 << 20         // bytes
	factRest    = time.Second     // a rank that could not be asked is not asked again for so long
)

// facts are what Askers have learned of prefill ranks. Reading one takes no
// lock; asking is done by one request per rank at a time, others wait for it.
type facts struct {
	known sync.Map // *worker.Rank -> *fact
}

type fact struct {
	text atomic.Pointer[string] // nil: not known

	mu    sync.Mutex // held while asking
	err   error
	until time.Time // nobody asks before, after err
}

// forget drops what is known of a rank: a pair with it has failed, and its
// engine may be another process by now.
func (f *facts) forget(r *worker.Rank) { f.known.Delete(r) }

// Left forgets a worker that has left or started anew.
func (r *Runner) Left(w *worker.Worker) {
	for _, rank := range w.Ranks {
		r.facts.forget(rank)
		r.silences.forget(rank)
	}
}

// learn keeps what a handle told.
func (f *facts) learn(r *worker.Rank, text []byte) {
	if v, ok := f.known.Load(r); ok {
		if have := v.(*fact).text.Load(); have != nil && *have == string(text) {
			return
		}
	}
	known, learned := new(fact), string(text)
	known.text.Store(&learned)
	f.known.Store(r, known)
	if r.Left() { // and was forgotten before
		f.forget(r)
	}
}

// identified tells the fleet what a hand-over calls prefill's engine: an id that was
// not known there is the sign of a restart. The question was put at the time asked.
func (r *Runner) identified(p *Pair, asked time.Time) {
	if id := p.EngineID; len(id) > 2 && id[0] == '"' {
		r.opt().Fleet.Identified(p.Prefill, id[1:len(id)-1], asked)
	}
}

// findFact puts what the family must know of the prefill rank into the pair,
// and asks for it where the family asks.
func (q *request) findFact() prefillEnd {
	asker, asks := q.plan.Family.(Asker)
	if !asks {
		if _, learns := q.plan.Family.(Learner); !learns {
			return prefillDone
		}
	}
	rank := q.pair.Prefill
	v, ok := q.r.facts.known.Load(rank)
	if ok {
		if text := v.(*fact).text.Load(); text != nil {
			q.pair.Fact = *text
			return prefillDone
		}
	}
	if !asks {
		return prefillDone
	}
	base, path := asker.Ask(&q.pair)
	if base == "" {
		return prefillDone
	}
	if !ok {
		v, _ = q.r.facts.known.LoadOrStore(rank, new(fact))
		if rank.Left() { // and was forgotten before
			q.r.facts.forget(rank)
		}
	}
	err := q.ask(asker, v.(*fact), base, path)
	if err == nil {
		return prefillDone
	}
	if q.x.Gone() {
		q.refuse(front.ClientGone, "the client closed the connection before prefill", 0)
		return prefillAnswered
	}
	q.exclude(rank, answeredBadly)
	q.fellBack("no_fact", fmt.Sprintf("%s cannot be used: %v", rank.ID, err))
	if q.renew(); q.triesLeft() && q.other(q.plan.Prefill) {
		return prefillAgain
	}
	return prefillNone
}

// ask fills f unless another request has done so meanwhile.
func (q *request) ask(asker Asker, f *fact, base, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if text := f.text.Load(); text != nil {
		q.pair.Fact = *text
		return nil
	}
	if f.err != nil && time.Now().Before(f.until) {
		return f.err
	}
	var text string
	asked := time.Now()
	if text, f.err = q.fetchFact(asker, base, path); f.err != nil {
		f.until = time.Now().Add(factRest)
		return f.err
	}
	q.r.identified(&q.pair, asked)
	f.text.Store(&text)
	q.pair.Fact = text
	return nil
}

func (q *request) fetchFact(asker Asker, base, path string) (string, error) {
	ep, err := upstream.NewEndpoint(base, upstream.Options{MaxConns: 1, ConnectTimeout: factTimeout})
	if err != nil {
		return "", err
	}
	defer ep.Close()
	status, body, err := ep.Get(path, factTimeout, factAnswer)
	switch {
	case err != nil:
		return "", err
	case status != 200:
		return "", fmt.Errorf("GET %s%s answered %d; want 200", base, path, status)
	}
	return asker.Fact(&q.pair, body)
}
