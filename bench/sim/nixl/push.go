package nixl

import (
	"context"
	"encoding/json"
	"net"
	"regexp"
	"strconv"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/offer"
)

// pushLeg is one leg of vLLM's NixlPushConnector (0.24 and later): decode allocates
// blocks and registers itself with prefill, and prefill writes. If the router knows the
// prefill's engine id, host and port, decode can start before prefill has responded;
// the request is then identified by its id, which both legs carry in X-Request-Id. That
// last rule is an assumption: no proxy for it was available.
type pushLeg struct {
	core.WholeLeg
	family  *push
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

// push is the family of vLLM's NixlPushConnector in one incarnation.
type push struct {
	p      *core.Process
	offers *offer.Table
}

// NewPush returns the family for one incarnation.
func NewPush(p *core.Process) core.Family { return &push{p, offer.NewTable(p)} }

// ServeSide implements core.Family.
func (f *push) ServeSide(c *httpconn.Conn, r *httpconn.Request) { f.offers.ServeSide(c, r) }

// Close implements core.Family.
func (f *push) Close() {}

// Read implements core.Family.
func (f *push) Read(b *api.Body, r *httpconn.Request) (core.Leg, error) {
	w, err := ReadParams(b.KVTransfer)
	if w == nil || err != nil {
		return nil, err
	}
	var p struct {
		Mode string `json:"transfer_mode"`
	}
	json.Unmarshal(b.KVTransfer, &p)
	switch {
	case w.RemotePrefill && p.Mode != "" && p.Mode != "push":
		// A handshake between a push engine and a pull engine fails.
		return &pushLeg{family: f, addr: "", engine: w.EngineID, key: w.RequestID}, nil
	case w.RemotePrefill && w.EngineID != "" && w.Host != "" && w.Port > 0:
		return &pushLeg{family: f, key: idSuffix.ReplaceAllString(w.RequestID, ""), engine: w.EngineID, addr: net.JoinHostPort(w.Host, strconv.Itoa(w.Port))}, nil
	case w.RemoteDecode && !w.RemotePrefill:
		return &pushLeg{family: f, prefill: true}, nil
	case w.RemotePrefill:
		f.p.IgnoredPD.Add(1)
	}
	return nil, nil
}

// Side implements core.Leg.
func (g *pushLeg) Side() string {
	if g.prefill {
		return "prefill"
	}
	return "decode"
}

// Begin sets the key of the hand-over where the parameters named none: the request's internal id
// without the suffix that the server adds.
func (g *pushLeg) Begin(j *core.Job) error {
	if g.key == "" {
		g.key = idSuffix.ReplaceAllString(j.Internal, "")
	}
	return nil
}

// Submit queues all sequences of a prefill, but only the first of a decode, whose transfer fills the
// blocks that the others share.
func (g *pushLeg) Submit(r *core.Rank, j *core.Job) {
	if !g.prefill {
		g.ctx, g.stop = context.WithCancel(r.Process.Context)
		r.Queue(j.Seqs[0])
		return
	}
	r.Queue(j.Seqs...)
}

// RetainBlocks offers the blocks of a prefill until a decode registers itself.
func (g *pushLeg) RetainBlocks(r *core.Rank, s *core.Seq) bool {
	if !g.prefill || !s.IsFirst() {
		return false
	}
	return g.family.offers.Offer(r, s, g.key, min(pushRegistration, r.Process.Options.AbortTimeout))
}

// OnAdmitted registers a decode's first sequence with the prefill engine and waits for the write. It
// ends in a call that frees the blocks there, whether or not they were written.
func (g *pushLeg) OnAdmitted(r *core.Rank, s *core.Seq) bool {
	if g.prefill || !s.IsFirst() {
		return false
	}
	f := r.Process.HandoverFault(s.Job)
	r.Transfer(s)
	q := offer.Call{EngineID: g.engine, Key: g.key, Sum: core.PromptSum(s.Prompt)}
	local := s.Local()
	r.Process.Go(func() {
		var reply offer.Reply
		ok := g.addr != ""
		if ok {
			reply, ok = g.family.offers.Fetch(g.ctx, f, g.addr, q, local)
			g.family.offers.Release(g.addr, g.engine, g.key)
		}
		r.Post(func() {
			g.done = true
			offer.Fetched(r, s, reply, ok)
		})
	})
	return true
}

// AppendHandle appends the handle: the same keys as in pull mode, with transfer_mode "push".
func (g *pushLeg) AppendHandle(b []byte, j *core.Job) []byte {
	if !g.prefill {
		return append(b, "null"...)
	}
	return appendHandle(b, j, g.key, "push")
}

// Cancel withdraws the offer of a prefill, and ends the transfer of a decode. A decode that was not
// scheduled frees the blocks of prefill itself; otherwise OnAdmitted does.
func (g *pushLeg) Cancel(r *core.Rank, j *core.Job) {
	if g.prefill {
		g.family.offers.Retire(r, g.key)
		return
	}
	if g.stop != nil {
		g.stop()
	}
	if !g.done && g.addr != "" && !j.Seqs[0].Scheduled() {
		g.done = true
		g.family.offers.Release(g.addr, g.engine, g.key)
	}
}

// OnRefused is assumed to be as in pull mode.
func (g *pushLeg) OnRefused() {
	if !g.prefill && g.addr != "" && g.key != "" && g.family.p.Options.VLLM.RefusalReleases() {
		g.family.offers.Release(g.addr, g.engine, g.key)
	}
}
