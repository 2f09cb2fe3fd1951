package sim

import (
	"context"
	"encoding/json"
	"net"
	"regexp"
	"strconv"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/httpconn"
)

// pushLeg is one leg of vLLM's NixlPushConnector (0.24 and later): decode allocates
// blocks and registers itself with prefill, and prefill writes. If the router knows the
// prefill's engine id, host and port, decode can start before prefill has responded;
// the request is then identified by its id, which both legs carry in X-Request-Id. That
// last rule is an assumption: no proxy for it was available.
type pushLeg struct {
	defaultLeg
	prefill bool
	key     string
	engine  string
	addr    string
	ctx     context.Context
	stop    context.CancelFunc
	done    bool
}

// pushRegistration is how long prefill keeps blocks without a registration
// (push_registration_timeout, by default decoder_kv_blocks_ttl).
const pushRegistration = 480 * time.Second

var idSuffix = regexp.MustCompile(`-[0-9a-f]{8}$`)

func readPush(l *incarnation, b *api.Body, r *httpconn.Request) (pdLeg, error) {
	h, err := readTransferParams(b.KVTransfer)
	if err != nil {
		return nil, api.Refuse(400, "body.kv_transfer_params", "%s", err)
	}
	if h == nil {
		return nil, nil
	}
	var p struct {
		Mode string `json:"transfer_mode"`
	}
	json.Unmarshal(b.KVTransfer, &p)
	w := &h.wire
	switch {
	case w.RemotePrefill && p.Mode != "" && p.Mode != "push":
		// A handshake between a push engine and a pull engine fails.
		return &pushLeg{addr: "", engine: w.EngineID, key: w.RequestID}, nil
	case w.RemotePrefill && w.EngineID != "" && w.Host != "" && w.Port > 0:
		return &pushLeg{key: idSuffix.ReplaceAllString(w.RequestID, ""), engine: w.EngineID, addr: net.JoinHostPort(w.Host, strconv.Itoa(w.Port))}, nil
	case w.RemoteDecode && !w.RemotePrefill:
		return &pushLeg{prefill: true}, nil
	case w.RemotePrefill:
		l.ignoredPD.Add(1)
	}
	return nil, nil
}

func (g *pushLeg) side() string {
	if g.prefill {
		return "prefill"
	}
	return "decode"
}

func (g *pushLeg) begin(j *job) error {
	if g.key == "" {
		g.key = idSuffix.ReplaceAllString(j.internal, "")
	}
	return nil
}

func (g *pushLeg) submit(r *rank, j *job) {
	if !g.prefill {
		g.ctx, g.stop = context.WithCancel(r.l.ctx)
		r.waiting = append(r.waiting, j.seqs[0])
		return
	}
	r.waiting = append(r.waiting, j.seqs...)
}

func (g *pushLeg) retainBlocks(r *rank, s *seq) bool {
	if !g.prefill || s != s.j.seqs[0] {
		return false
	}
	return r.offer(s, g.key, min(pushRegistration, r.o.AbortTimeout))
}

func (g *pushLeg) onAdmitted(r *rank, s *seq) bool {
	if g.prefill || s != s.j.seqs[0] {
		return false
	}
	f := r.e.matchFault(s.j.req, "handover", false)
	r.transfer(s)
	q := offerCall{EngineID: g.engine, Key: g.key, Sum: promptSum(s.Prompt)}
	local := s.local
	r.l.wg.Go(func() {
		var reply offerReply
		ok := g.addr != ""
		if ok {
			reply, ok = r.l.fetchOffer(g.ctx, f, g.addr, q, local)
			r.l.releaseOffer(g.addr, g.engine, g.key)
		}
		r.post(func() {
			g.done = true
			r.offerFetched(s, reply, ok)
		})
	})
	return true
}

// params appends the handle: the same keys as in pull mode, with transfer_mode "push".
func (g *pushLeg) params(b []byte, j *job) []byte {
	if !g.prefill {
		return append(b, "null"...)
	}
	return j.nixlHandle(b, g.key, "push")
}

func (g *pushLeg) cancel(r *rank, j *job) {
	if g.prefill {
		r.offers.retire(g.key)
		return
	}
	if g.stop != nil {
		g.stop()
	}
	if !g.done && g.addr != "" && !j.seqs[0].pulling && !j.seqs[0].pulled {
		g.done = true
		r.l.releaseOffer(g.addr, g.engine, g.key)
	}
}

// onRefused is assumed to be as in pull mode.
func (g *pushLeg) onRefused(l *incarnation) {
	if !g.prefill && g.addr != "" && g.key != "" && l.e.o.VLLM.RefusalReleases() {
		l.releaseOffer(g.addr, g.engine, g.key)
	}
}
