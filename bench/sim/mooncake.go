package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"sluice/bench/sim/api"
	"sluice/bench/sim/bootstrap"
	"sluice/bench/sim/httpconn"
)

// mooncakeLeg is one leg of vLLM's MooncakeConnector (0.16 and later). Prefill returns
// no handle. Both legs carry a transfer_id, and decode the engine id and the bootstrap
// address of the prefill.
type mooncakeLeg struct {
	defaultLeg
	prefill   bool
	id        string // transfer_id
	engine    string // decode: remote_engine_id
	bootstrap string // decode: remote_bootstrap_addr, without scheme
	ctx       context.Context
	stop      context.CancelFunc
	done      bool // decode: prefill has been notified
}

// readMooncake reads kv_transfer_params. A decode that lacks one of its three keys
// computes the prompt itself, with a warning; the engine counts it.
func readMooncake(l *incarnation, b *api.Body, r *httpconn.Request) (pdLeg, error) {
	if len(b.KVTransfer) == 0 || string(b.KVTransfer) == "null" {
		return nil, nil
	}
	if _, err := readTransferParams(b.KVTransfer); err != nil {
		return nil, api.Refuse(400, "body.kv_transfer_params", "%s", err)
	}
	var p struct {
		Decode  bool   `json:"do_remote_decode"`
		Prefill bool   `json:"do_remote_prefill"`
		ID      string `json:"transfer_id"`
		Engine  string `json:"remote_engine_id"`
		Boot    string `json:"remote_bootstrap_addr"`
	}
	if err := json.Unmarshal(b.KVTransfer, &p); err != nil {
		return nil, api.Refuse(400, "body.kv_transfer_params", "kv_transfer_params: %s", err)
	}
	switch {
	case p.Prefill && p.ID != "" && p.Engine != "" && strings.HasPrefix(p.Boot, "http://"):
		return &mooncakeLeg{id: p.ID, engine: p.Engine, bootstrap: strings.TrimPrefix(p.Boot, "http://")}, nil
	case p.Decode && !p.Prefill && p.ID != "":
		return &mooncakeLeg{prefill: true, id: p.ID}, nil
	case p.Prefill || p.Decode:
		l.ignoredPD.Add(1)
	}
	return nil, nil
}

func (g *mooncakeLeg) side() string {
	if g.prefill {
		return "prefill"
	}
	return "decode"
}

func (g *mooncakeLeg) submit(r *rank, j *job) {
	if !g.prefill {
		g.ctx, g.stop = context.WithCancel(r.l.ctx)
		r.waiting = append(r.waiting, j.seqs[0]) // the other sequences of n find its blocks in the cache
		return
	}
	r.waiting = append(r.waiting, j.seqs...)
}

// retainBlocks offers the blocks of a prefill that ended because it reached max_tokens;
// any other end cancels the transfer.
func (g *mooncakeLeg) retainBlocks(r *rank, s *seq) bool {
	if !g.prefill || s != s.j.seqs[0] {
		return false
	}
	if s.Reason == "length" {
		return r.offer(s, g.id, r.o.AbortTimeout)
	}
	r.offers.retire(g.id)
	return false
}

func (g *mooncakeLeg) onAdmitted(r *rank, s *seq) bool {
	if g.prefill || s != s.j.seqs[0] {
		return false
	}
	f := r.e.matchFault(s.j.req, "handover", false)
	r.transfer(s)
	q := offerCall{EngineID: g.engine, Key: g.id, Sum: promptSum(s.Prompt)}
	local := s.local
	r.l.wg.Go(func() {
		// A decode that is dropped during its fetch notifies prefill nevertheless: vLLM
		// keeps an aborted request until its transfer has ended.
		addr, err := r.l.mooncakeWorker(r.l.ctx, g.bootstrap, g.engine)
		var reply offerReply
		ok := err == nil
		if ok {
			reply, ok = r.l.fetchOffer(g.ctx, f, addr, q, local)
			r.l.releaseOffer(addr, g.engine, g.id)
		}
		r.post(func() {
			g.done = true
			r.offerFetched(s, reply, ok)
		})
	})
	return true
}

// offerFetched ends a fetch on the rank's goroutine. A failed fetch fails the request,
// as kv_load_failure_policy "fail" does.
func (r *rank) offerFetched(s *seq, reply offerReply, ok bool) {
	tokens := 0
	if ok {
		tokens = reply.Tokens
	}
	if reply.Mismatched {
		r.counters.roomsMismatched++
	}
	if !r.transferDone(s, tokens, reply.Tokens) {
		return
	}
	if !ok {
		r.counters.pullsFailed++
		r.fail(s.j, 500, "Internal server error")
		return
	}
	r.queueSiblings(s)
}

// cancel notifies the prefill if the decode ends before it was scheduled, as vLLM does.
func (g *mooncakeLeg) cancel(r *rank, j *job) {
	if g.prefill {
		r.offers.retire(g.id)
		return
	}
	if g.stop != nil {
		g.stop()
	}
	if !g.done && !j.seqs[0].pulling && !j.seqs[0].pulled {
		g.done = true
		r.l.wg.Go(func() {
			if addr, err := r.l.mooncakeWorker(r.l.ctx, g.bootstrap, g.engine); err == nil {
				r.l.releaseOffer(addr, g.engine, g.id)
			}
		})
	}
}

// onRefused does as with NIXL: decode's server submits an aborted request instead.
func (g *mooncakeLeg) onRefused(l *incarnation) {
	if g.prefill || !l.e.o.VLLM.RefusalReleases() {
		return
	}
	l.wg.Go(func() {
		if addr, err := l.mooncakeWorker(l.ctx, g.bootstrap, g.engine); err == nil {
			l.releaseOffer(addr, g.engine, g.id)
		}
	})
}

// mooncakeWorker queries a bootstrap server for the worker of an engine id.
func (l *incarnation) mooncakeWorker(ctx context.Context, boot, engine string) (string, error) {
	var ranks map[string]bootstrap.WorkerRank
	if err := l.call(ctx, "GET", strings.TrimSuffix(boot, "/"), "/query", nil, &ranks); err != nil {
		return "", err
	}
	for _, e := range ranks {
		if e.EngineID == engine && e.Addr["0"]["0"] != "" {
			return e.Addr["0"]["0"], nil
		}
	}
	return "", fmt.Errorf("sim: %s does not know engine id %q", boot, engine)
}
