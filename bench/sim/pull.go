package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
)

// handle is decode's view of kv_transfer_params.
type handle struct {
	wire struct {
		RemotePrefill bool            `json:"do_remote_prefill"`
		RemoteDecode  bool            `json:"do_remote_decode"`
		BlockIDs      json.RawMessage `json:"remote_block_ids"`
		EngineID      string          `json:"remote_engine_id"`
		RequestID     string          `json:"remote_request_id"`
		Host          string          `json:"remote_host"`
		Port          int             `json:"remote_port"`
		NumTokens     int             `json:"remote_num_tokens"`
		PrefillCached *int            `json:"remote_prefill_cached_tokens"`
		PromptIDs     json.RawMessage `json:"prompt_token_ids"`
	}
	prefillCached *int
	cancel        sync.Once
	cancelled     chan struct{} // closed when the job is dropped
	once          sync.Once     // one release only
}

// incomplete reports that the block ids are missing, null or empty, which crashes a
// real 0.32 decode engine.
func (h *handle) incomplete() bool {
	s := strings.Map(func(r rune) rune {
		if r == ' ' || r == '\n' || r == '\t' || r == '\r' {
			return -1
		}
		return r
	}, string(h.wire.BlockIDs))
	return s == "" || s == "null" || s == "[]" || s == "[[]]"
}

// usable reports that vLLM would pull: it needs all four of these.
func (h *handle) usable() bool {
	w := &h.wire
	return w.EngineID != "" && w.RequestID != "" && w.Host != "" && w.Port > 0
}

func (h *handle) peer() string { return net.JoinHostPort(h.wire.Host, strconv.Itoa(h.wire.Port)) }

// puller is decode's part of transfers: reads, releases and heartbeats.
type puller struct {
	l                *incarnation
	mu               sync.Mutex
	tracked          map[*handle]struct{} // heartbeats are sent for these
	heartbeatRunning bool
	handshakes       map[string]bool // engine ids with which a handshake was done
}

func (p *puller) init(l *incarnation) {
	p.l, p.tracked, p.handshakes = l, make(map[*handle]struct{}), make(map[string]bool)
}

// track starts the heartbeats for a handle whose request is queued.
func (p *puller) track(h *handle) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tracked[h] = struct{}{}
	if !p.l.e.o.VLLM.Heartbeats() {
		return
	}
	if !p.heartbeatRunning {
		p.heartbeatRunning = true
		p.l.wg.Go(p.heartbeat)
	}
}

// heartbeat renews leases every sixth of a lease while any handle is tracked.
func (p *puller) heartbeat() {
	t := time.NewTicker(max(p.l.e.o.Lease/6, time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-p.l.stopc:
			return
		}
		type key struct{ peer, engine string }
		lists := make(map[key][]string)
		p.mu.Lock()
		if len(p.tracked) == 0 {
			p.heartbeatRunning = false
			p.mu.Unlock()
			return
		}
		for h := range p.tracked {
			k := key{h.peer(), h.wire.EngineID}
			lists[k] = append(lists[k], h.wire.RequestID)
		}
		p.mu.Unlock()
		for k, ids := range lists {
			p.call(k.peer, "/heartbeat", k.engine, ids)
		}
	}
}

// release notifies the prefill, once and without waiting, that the blocks are no longer
// needed.
func (p *puller) release(h *handle) { h.once.Do(func() { p.l.wg.Go(func() { p.notify(h) }) }) }

func (p *puller) notify(h *handle) {
	p.mu.Lock()
	delete(p.tracked, h)
	p.mu.Unlock()
	p.call(h.peer(), "/done", h.wire.EngineID, []string{h.wire.RequestID})
}

// pullOutcome is the result of a pull.
type pullOutcome uint8

const (
	pullOK        pullOutcome = iota
	pullLeaseGone             // the prefill no longer has the blocks
	pullFailed                // no response in time, or not the engine that the handle names
)

// call posts to a peer's side channel.
func (p *puller) call(peer, path, engine string, ids []string) (sideChannelReply, error) {
	var reply sideChannelReply
	body, _ := json.Marshal(sideChannelRequest{engine, ids})
	req, err := http.NewRequestWithContext(p.l.ctx, "POST", "http://"+peer+path, bytes.NewReader(body))
	if err != nil {
		return reply, err
	}
	client := *p.l.peer
	client.Timeout = 5 * time.Second
	resp, err := client.Do(req)
	if err != nil {
		return reply, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err == nil && resp.StatusCode != 200 {
		err = fmt.Errorf("sim: cannot pull from %q: %s", peer, resp.Status)
	}
	if err == nil {
		err = json.Unmarshal(b, &reply)
	}
	return reply, err
}

// startPull starts the transfer for s, which has its blocks. It returns false if the
// local cache makes the transfer unnecessary. It runs on the rank's goroutine.
func (r *rank) startPull(s *seq, h *handle) bool {
	remote := h.wire.NumTokens
	if remote <= 0 || remote > len(s.Prompt) {
		remote = len(s.Prompt)
	}
	remote = min(remote, len(s.Prompt)-1)
	if remote <= s.local {
		s.pulled = true
		r.l.pull.release(h)
		r.queueSiblings(s)
		return false
	}
	r.transfer(s)
	f := r.e.matchFault(s.j.req, "handover", false)
	r.l.wg.Go(func() {
		out := pullFailed
		if r.l.pull.injectFault(h, f) {
			// vLLM does not notify prefill of a failed transfer (0.32,
			// _handle_failed_transfer), but does of one whose request was aborted.
			select {
			case <-h.cancelled:
				r.l.pull.release(h)
			default:
			}
		} else {
			out = r.l.pull.pull(h, remote-s.local)
		}
		r.post(func() { r.pullDone(s, h, remote, out) })
	})
	return true
}

// injectFault applies a fault of the hand-over and reports whether the pull fails.
func (p *puller) injectFault(h *handle, f *faults.Fault) bool {
	if f == nil {
		return false
	}
	ctx, cancel := context.WithCancel(p.l.ctx)
	defer cancel()
	p.l.wg.Go(func() {
		select {
		case <-h.cancelled:
			cancel()
		case <-ctx.Done():
		}
	})
	return !faultTransfer(ctx, f)
}

// pull reads the blocks: handshake, check that they are there, wait for the time of the
// bytes, notify.
func (p *puller) pull(h *handle, tokens int) pullOutcome {
	o := &p.l.e.o
	deadline := time.Now().Add(o.PullTimeout)
	peer := h.peer()
	p.mu.Lock()
	first := !p.handshakes[h.wire.EngineID]
	if len(p.handshakes) > 4096 {
		clear(p.handshakes)
	}
	p.handshakes[h.wire.EngineID] = true
	p.mu.Unlock()
	if first && !p.sleep(h, cost.Scale(o.Cost.Handshake, o.Speed)) {
		p.release(h)
		return pullFailed
	}
	for {
		reply, err := p.call(peer, "/read", h.wire.EngineID, []string{h.wire.RequestID})
		if err != nil {
			if time.Now().After(deadline) || !p.sleep(h, min(o.PullTimeout/10, 100*time.Millisecond)) {
				p.release(h)
				return pullFailed
			}
			continue
		}
		p.sleep(h, cost.Scale(o.Cost.TransferTime(tokens), o.Speed))
		h.once.Do(func() { p.notify(h) })
		if !reply.Held {
			return pullLeaseGone
		}
		return pullOK
	}
}

// sleep returns false if the job is dropped or the incarnation ends.
func (p *puller) sleep(h *handle, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-h.cancelled:
	case <-p.l.stopc:
	}
	return false
}

// pullDone ends a transfer on the rank's goroutine.
func (r *rank) pullDone(s *seq, h *handle, remote int, out pullOutcome) {
	r.endTransfer(s)
	if s.j.ended {
		r.pool.Release(s.blocks)
		s.blocks = nil
		return
	}
	s.pulled = true
	switch {
	case out == pullFailed:
		r.counters.pullsFailed++
		r.fail(s.j, 500, "Internal server error")
		return
	case out == pullLeaseGone:
		r.counters.garbage++
		if r.o.Expired != "garbage" {
			r.fail(s.j, 500, "Internal server error")
			if r.o.Expired == "crash" {
				go r.e.crash(r.l, false)
			}
			return
		}
	}
	total := len(s.Prompt)
	r.counters.transfers++
	r.counters.transferBytes += int64(remote-s.local) * int64(r.o.Cost.BytesToken)
	r.counters.descriptors += int64((remote - s.local + r.o.BlockSize - 1) / r.o.BlockSize)
	r.counters.transferTime += r.o.Cost.TransferTime(remote - s.local)
	r.counters.localHit += int64(s.local)
	r.counters.external += int64(total - s.local)
	r.counters.prompt += int64(total)
	s.computed, s.Cached = remote, remote
	r.store(s, s.local)
	r.ready = append(r.ready, s)
	r.queueSiblings(s)
}

// queueSiblings queues the other sequences of the job once the first has its blocks.
func (r *rank) queueSiblings(s *seq) {
	for _, x := range s.j.seqs[1:] {
		x.pulled = true
		r.waiting = append(r.waiting, x)
	}
}
