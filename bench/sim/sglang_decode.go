package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
)

// findPrefill asks the bootstrap server for the rank of the room and its address. Only
// then is the sequence queued for blocks.
func (g *sglangLeg) findPrefill(r *rank, s *seq) {
	r.transfer(s)
	m := s.handover
	r.l.wg.Go(func() {
		why := r.l.findPrefill(m, g.prefillRank)
		r.post(func() {
			r.endTransfer(s)
			switch {
			case s.j.ended:
			case why != "":
				r.counters.pullsFailed++
				r.failRoom(s, why)
			default:
				r.waiting = append(r.waiting, s)
			}
		})
	})
}

// onAdmitted starts the transfer: the blocks are allocated, so prefill may send.
func (g *sglangLeg) onAdmitted(r *rank, s *seq) bool {
	if g.prefill {
		return false
	}
	r.transfer(s)
	m, f := s.handover, r.e.matchFault(s.j.req, "handover", false)
	call := roomCall{Room: m.room, Rank: m.rank, Tokens: len(s.Prompt), Sum: promptSum(s.Prompt)}
	r.l.wg.Go(func() {
		defer m.stop()
		reply, why := r.l.receive(m, f, call)
		r.post(func() {
			if why == "" {
				r.transferDone(s, len(s.Prompt), reply.Cached)
			} else if r.transferDone(s, 0, 0) {
				r.counters.pullsFailed++
				r.failRoom(s, why)
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
func (l *incarnation) findPrefill(m *roomHandover, rank int) string {
	addr := net.JoinHostPort(m.host, strconv.Itoa(m.port))
	for try := 1; ; try++ {
		why := l.queryBootstrap(m, rank, addr)
		if why == "" || try == maxBootstrapTries || !sleepContext(m.ctx, 100*time.Millisecond) {
			return why
		}
	}
}

func (l *incarnation) queryBootstrap(m *roomHandover, rank int, addr string) string {
	l.prefillMu.Lock()
	info := l.prefills[addr]
	l.prefillMu.Unlock()
	if info == nil {
		info = &prefillServer{sideAddrs: make(map[int]string)}
		if err := l.call(m.ctx, "GET", addr, "/route?"+routeQuery(-1), nil, info); err != nil || info.DPSize < 1 {
			return fmt.Sprintf("Could not fetch prefill parallel info from bootstrap_addr: %s: %v", addr, err)
		}
		if !sleepContext(m.ctx, cost.Scale(l.e.o.Cost.Handshake, l.e.o.Speed)) {
			return "aborted"
		}
		l.prefillMu.Lock()
		if len(l.prefills) > 1024 {
			clear(l.prefills)
		}
		l.prefills[addr] = info
		l.prefillMu.Unlock()
	}
	switch {
	case rank >= 0:
	case info.Follow:
		rank = int(m.room % int64(info.DPSize))
	default:
		var why string
		if rank, why = l.queryRank(m, addr); why != "" {
			return why
		}
	}
	l.prefillMu.Lock()
	side, ok := info.sideAddrs[rank]
	l.prefillMu.Unlock()
	if !ok {
		var at struct {
			IP   string `json:"rank_ip"`
			Port int    `json:"rank_port"`
		}
		if err := l.call(m.ctx, "GET", addr, "/route?"+routeQuery(rank), nil, &at); err != nil {
			return fmt.Sprintf("Could not fetch bootstrap info for dp rank %d from bootstrap_addr: %s: %v", rank, addr, err)
		}
		side = net.JoinHostPort(at.IP, strconv.Itoa(at.Port))
		l.prefillMu.Lock()
		info.sideAddrs[rank] = side
		l.prefillMu.Unlock()
	}
	m.rank, m.side = rank, side
	return ""
}

// queryRank asks for the rank of a room until prefill has registered it.
func (l *incarnation) queryRank(m *roomHandover, addr string) (int, string) {
	for end := time.Now().Add(l.e.o.WaitingTimeout); ; {
		var ranks map[string]int
		key := strconv.FormatInt(m.room, 10)
		err := l.call(m.ctx, "POST", addr, "/query_dp_ranks", map[string]any{"bootstrap_rooms": []int64{m.room}}, &ranks)
		if err != nil {
			return 0, fmt.Sprintf("Could not query dp ranks from bootstrap_addr: %s: %v", addr, err)
		}
		if k, ok := ranks[key]; ok {
			return k, ""
		}
		if time.Now().After(end) || !sleepContext(m.ctx, 20*time.Millisecond) {
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
func (l *incarnation) receive(m *roomHandover, f *faults.Fault, call roomCall) (roomReply, string) {
	if !faultTransfer(m.ctx, f) {
		return roomReply{}, "Failed to receive kv chunk"
	}
	path, failures := "/room/open", 0
	for end := time.Now().Add(l.e.o.WaitingTimeout); ; {
		var reply roomReply
		err := l.call(m.ctx, "POST", m.side, path, call, &reply)
		switch {
		case m.ctx.Err() != nil:
			return reply, "aborted"
		case err != nil:
			l.forgetPrefill(net.JoinHostPort(m.host, strconv.Itoa(m.port)))
			if failures++; failures == 2 {
				return reply, fmt.Sprintf("Lost connection with prefill instance (bootstrap_addr: %s:%d)", m.host, m.port)
			}
			sleepContext(m.ctx, l.e.o.HeartbeatInterval)
			continue
		case reply.Done:
			return reply, reply.Error
		}
		path, failures = "/room/wait", 0
		if time.Now().After(end) {
			return reply, fmt.Sprintf("Request timed out after %.1fs in KVPoll.WaitingForInput", l.e.o.WaitingTimeout.Seconds())
		}
	}
}

func (l *incarnation) forgetPrefill(addr string) {
	l.prefillMu.Lock()
	delete(l.prefills, addr)
	l.prefillMu.Unlock()
}

// call makes one call to another engine's bootstrap server or side channel.
func (l *incarnation) call(ctx context.Context, method, addr, path string, body, reply any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var rd io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		rd = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, rd)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := l.peer.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != 200 {
		return fmt.Errorf("%s %s: %s: %.100s", method, path, resp.Status, b)
	}
	if reply == nil {
		return nil
	}
	return json.Unmarshal(b, reply)
}

// sleepContext sleeps d; it returns false if ctx ends meanwhile.
func sleepContext(ctx context.Context, d time.Duration) bool {
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

// faultTransfer applies a fault of the hand-over: Stall and Slow wait (a stall without
// Delay until ctx ends); all other kinds make the transfer fail, which returns false.
func faultTransfer(ctx context.Context, f *faults.Fault) bool {
	switch {
	case f == nil:
		return true
	case f.Kind == faults.Stall && f.Delay <= 0:
		<-ctx.Done()
		return false
	case f.Kind == faults.Stall || f.Kind == faults.Slow:
		return sleepContext(ctx, f.Delay)
	}
	return false
}
