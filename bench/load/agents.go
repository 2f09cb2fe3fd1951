package load

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"
)

// agent is one session: a conversation whose prompt grows by each answer and by the result of
// the tool that the agent calls meanwhile.
type agent struct {
	o       *Options
	src     *Source
	index   int
	session string
	turns   int
	rng     *rand.Rand
	parts   []part
	tokens  int // of parts, as far as known
}

// part is a piece of a conversation, in the form in which the endpoint takes prompts.
type part struct {
	answer bool // written by the model
	ids    []uint32
	text   string
}

// newAgent makes agent number i of a source; prefix is its system prompt.
func newAgent(o *Options, src *Source, index, i int, prefix []uint32) *agent {
	a := &agent{o: o, src: src, index: index, session: src.Name + "-" + strconv.Itoa(i), rng: rand.New(rand.NewPCG(o.Seed, uint64(index)<<32|uint64(i)|1<<63))}
	a.turns = src.Turns + a.rng.IntN(src.MaxTurns-src.Turns+1)
	own := max(0, lengthOf(a.rng, src.PromptTokens, src.Spread)-len(prefix))
	a.add(append(append([]uint32{}, prefix...), randomTokens(a.rng, own)...))
	return a
}

// add appends a message of synthetic tokens.
func (a *agent) add(tokens []uint32) {
	p := part{text: string(appendText(nil, tokens))}
	for _, t := range tokens {
		p.ids = append(p.ids, tokenID(t))
	}
	a.parts = append(a.parts, p)
	a.tokens += len(tokens)
}

// answered appends an answer and the result of the tool that it calls.
func (a *agent) answered(out output, tokens int) {
	a.parts = append(a.parts, part{answer: true, ids: out.ids, text: string(out.text)})
	a.tokens += tokens
	a.add(randomTokens(a.rng, lengthOf(a.rng, a.src.Grow, a.src.Spread)))
}

// pause returns the time until the next request.
func (a *agent) pause() time.Duration {
	return time.Duration(a.rng.ExpFloat64() * float64(a.src.Pause))
}

// job returns the next request; final says that it is the last.
func (a *agent) job(final bool) Job {
	n := lengthOf(a.rng, a.src.OutputTokens, a.src.Spread)
	return Job{Body: a.render(n), Tokens: a.tokens, Output: n, Session: a.session, source: a.index, collect: true, final: final}
}

// render writes the request body.
func (a *agent) render(output int) []byte {
	b := make([]byte, 0, 256+8*a.tokens)
	b = appendStart(b, a.o, a.src.Priority)
	switch {
	case a.o.Endpoint == "chat":
		b = append(appendLimit(b, output), `,"messages":[`...)
		for i, p := range a.parts {
			role := `{"role":"user","content":`
			if p.answer {
				role = `{"role":"assistant","content":`
			}
			if i > 0 {
				b = append(b, ',')
			}
			b = append(appendJSON(append(b, role...), p.text), '}')
		}
		return append(b, "]}"...)
	case a.o.Endpoint == "completions" && !a.o.TokenIDs:
		b = append(appendLimit(b, output), `,"prompt":`...)
		var all []byte
		for i, p := range a.parts {
			if i > 0 && !p.answer {
				all = append(all, ' ')
			}
			all = append(all, p.text...)
		}
		return append(appendJSON(b, string(all)), '}')
	case a.o.Endpoint == "completions":
		b = append(appendLimit(b, output), `,"return_token_ids":true,"prompt":`...)
	default: // generate
		b = append(appendLimit(append(b, `,"sampling_params":{`...), output), `},"token_ids":`...)
	}
	b = append(b, '[')
	for i, p := range a.parts {
		for j, id := range p.ids {
			if i+j > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendUint(b, uint64(id), 10)
		}
	}
	return append(b, "]}"...)
}

// Bounds of an agent's wait before it repeats a refused request.
const (
	minRetryWait = 100 * time.Millisecond
	maxRetryWait = 5 * time.Second
)

// runAgents runs the sessions of a source, all at once. Each ends with its last turn, with a
// request that fails, or with ctx.
func (r *run) runAgents(ctx context.Context, index int) {
	src := &r.sources[index]
	prefixes := newSynthetic(&r.o, src, index).prefix
	var wg sync.WaitGroup
	for i := range src.Agents {
		wg.Go(func() {
			a := newAgent(&r.o, src, index, i, prefixes[i%len(prefixes)])
			c := r.newClient()
			defer c.close()
			if !pause(ctx, time.Duration(a.rng.Float64()*float64(src.Start))) {
				return
			}
			began := time.Now()
			finished := r.runAgent(ctx, a, c)
			r.rec.session(time.Since(began), finished)
		})
	}
	wg.Wait()
}

// runAgent reports whether the session had its last turn.
func (r *run) runAgent(ctx context.Context, a *agent, c *client) bool {
	for turn := range a.turns {
		if turn > 0 && !pause(ctx, a.pause()) || ctx.Err() != nil {
			return false
		}
		res, ok := r.runTurn(ctx, a.job(turn == a.turns-1), c)
		if !ok {
			return false
		}
		a.answered(res.output, res.Output)
	}
	return true
}

// runTurn sends one request until it is not refused. Its latencies count from the first try.
func (r *run) runTurn(ctx context.Context, job Job, c *client) (Result, bool) {
	from := time.Now()
	c.gap = nil
	if r.rec.window.has(from) {
		c.gap = r.rec.gap
	}
	for {
		r.inFlight.Add(1)
		res := c.do(r.cut, &job, from)
		r.inFlight.Add(-1)
		if !res.refused() {
			r.finish(&res, &job, from)
			return res, res.Err == nil
		}
		r.rec.retry()
		if !pause(ctx, min(max(res.RetryAfter, minRetryWait), maxRetryWait)) {
			r.finish(&res, &job, from)
			return res, false
		}
	}
}

// pause waits for d; it returns false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
