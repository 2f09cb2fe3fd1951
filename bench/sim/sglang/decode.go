package sglang

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"

	"sluice/bench/sim/core"
	"sluice/bench/sim/faults"
)

// findPrefill asks the bootstrap server for the rank of the room and its address. Only
// then is the sequence queued for blocks.
func (g *leg) findPrefill(r *core.Rank, s *core.Seq) {
	r.Transfer(s)
	m := g.handovers[s]
	r.Process.Go(func() {
		why := g.family.findPrefill(m, g.prefillRank)
		r.Post(func() {
			r.EndTransfer(s)
			switch {
			case s.Job.Ended():
			case why != "":
				r.Counters.PullsFailed++
				g.fail(r, s, why)
			default:
				r.Queue(s)
			}
		})
	})
}

// OnAdmitted starts the transfer: the blocks are allocated, so prefill may send.
func (g *leg) OnAdmitted(r *core.Rank, s *core.Seq) bool {
	if g.prefill {
		return false
	}
	r.Transfer(s)
	m, f := g.handovers[s], r.Process.HandoverFault(s.Job)
	call := roomCall{Room: m.room, Rank: m.rank, Tokens: len(s.Prompt), Sum: core.PromptSum(s.Prompt)}
	r.Process.Go(func() {
		defer m.stop()
		reply, why := g.family.receive(m, f, call)
		r.Post(func() {
			if why == "" {
				r.TransferDone(s, len(s.Prompt), reply.Cached)
			} else if r.TransferDone(s, 0, 0) {
				r.Counters.PullsFailed++
				g.fail(r, s, why)
			}
		})
	})
	return true
}

// prefillServer is what a decode caches about a prefill server.
type prefillServer struct {
	DPSize    int  `json:"dp_size"`
	Follow    bool `json:"follow_bootstrap_room"`
	sideAddrs map[int]string
}

const maxBootstrapTries = 3 // attempts to reach a bootstrap server before the request fails

// findPrefill sets m's rank and side, or returns the reason why it cannot.
func (f *family) findPrefill(m *handover, rank int) string {
	addr := net.JoinHostPort(m.host, strconv.Itoa(m.port))
	for try := 1; ; try++ {
		why := f.queryBootstrap(m, rank, addr)
		if why == "" || try == maxBootstrapTries || !core.Sleep(m.ctx, 100*time.Millisecond) {
			return why
		}
	}
}

func (f *family) queryBootstrap(m *handover, rank int, addr string) string {
	f.mu.Lock()
	info := f.prefills[addr]
	f.mu.Unlock()
	if info == nil {
		info = &prefillServer{sideAddrs: make(map[int]string)}
		if err := f.p.Call(m.ctx, "GET", addr, "/route?"+routeQuery(-1), nil, info); err != nil || info.DPSize < 1 {
			return fmt.Sprintf("Could not fetch prefill parallel info from bootstrap_addr: %s: %v", addr, err)
		}
		if !core.Sleep(m.ctx, f.p.Handshake()) {
			return "aborted"
		}
		f.mu.Lock()
		if len(f.prefills) > 1024 {
			clear(f.prefills)
		}
		f.prefills[addr] = info
		f.mu.Unlock()
	}
	switch {
	case rank >= 0:
	case info.Follow:
		rank = int(m.room % int64(info.DPSize))
	default:
		var why string
		if rank, why = f.queryRank(m, addr); why != "" {
			return why
		}
	}
	f.mu.Lock()
	side, ok := info.sideAddrs[rank]
	f.mu.Unlock()
	if !ok {
		var at struct {
			IP   string `json:"rank_ip"`
			Port int    `json:"rank_port"`
		}
		if err := f.p.Call(m.ctx, "GET", addr, "/route?"+routeQuery(rank), nil, &at); err != nil {
			return fmt.Sprintf("Could not fetch bootstrap info for dp rank %d from bootstrap_addr: %s: %v", rank, addr, err)
		}
		side = net.JoinHostPort(at.IP, strconv.Itoa(at.Port))
		f.mu.Lock()
		info.sideAddrs[rank] = side
		f.mu.Unlock()
	}
	m.rank, m.side = rank, side
	return ""
}

// queryRank asks for the rank of a room until prefill has registered it.
func (f *family) queryRank(m *handover, addr string) (int, string) {
	for end := time.Now().Add(f.p.Options.WaitingTimeout); ; {
		var ranks map[string]int
		key := strconv.FormatInt(m.room, 10)
		err := f.p.Call(m.ctx, "POST", addr, "/query_dp_ranks", map[string]any{"bootstrap_rooms": []int64{m.room}}, &ranks)
		if err != nil {
			return 0, fmt.Sprintf("Could not query dp ranks from bootstrap_addr: %s: %v", addr, err)
		}
		if k, ok := ranks[key]; ok {
			return k, ""
		}
		if time.Now().After(end) || !core.Sleep(m.ctx, 20*time.Millisecond) {
			return 0, "Request timed out waiting for the prefill dp rank"
		}
	}
}

func routeQuery(rank int) string {
	other := "0"
	if rank < 0 {
		other = "-1"
	}
	return url.Values{"prefill_dp_rank": {strconv.Itoa(rank)}, "prefill_cp_rank": {other}, "target_tp_rank": {other}, "target_pp_rank": {other}}.Encode()
}

// receive tells prefill that the blocks are ready and waits for the KV.
func (f *family) receive(m *handover, fault *faults.Fault, call roomCall) (roomReply, string) {
	if !core.FaultTransfer(m.ctx, fault) {
		return roomReply{}, "Failed to receive kv chunk"
	}
	path, failures := "/room/open", 0
	for end := time.Now().Add(f.p.Options.WaitingTimeout); ; {
		var reply roomReply
		err := f.p.Call(m.ctx, "POST", m.side, path, call, &reply)
		switch {
		case m.ctx.Err() != nil:
			return reply, "aborted"
		case err != nil:
			f.forgetPrefill(net.JoinHostPort(m.host, strconv.Itoa(m.port)))
			if failures++; failures == 2 {
				return reply, fmt.Sprintf("Lost connection with prefill instance (bootstrap_addr: %s:%d)", m.host, m.port)
			}
			core.Sleep(m.ctx, f.p.Options.HeartbeatInterval)
			continue
		case reply.Done:
			return reply, reply.Error
		}
		path, failures = "/room/wait", 0
		if time.Now().After(end) {
			return reply, fmt.Sprintf("Request timed out after %.1fs in KVPoll.WaitingForInput", f.p.Options.WaitingTimeout.Seconds())
		}
	}
}

func (f *family) forgetPrefill(addr string) {
	f.mu.Lock()
	delete(f.prefills, addr)
	f.mu.Unlock()
}
