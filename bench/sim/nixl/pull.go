// Package nixl has the hand-over of vLLM's NIXL connectors: in pull mode (NixlConnector) decode reads the
// blocks that a handle names, in push mode (NixlPushConnector) prefill writes them. NIXL itself is a private
// HTTP exchange, whose time is bytes over bandwidth.
package nixl

import (
	"context"
	"sync"
	"time"

	"sluice/bench/sim/core"
	"sluice/bench/sim/faults"
)

// Puller is decode's part of the transfers of one incarnation: reads, releases and heartbeats.
type Puller struct {
	p                *core.Process
	mu               sync.Mutex
	tracked          map[*Handle]struct{} // heartbeats are sent for these
	heartbeatRunning bool
	handshakes       map[string]bool // engine ids with which a handshake was done
}

// NewPuller returns the puller of an incarnation.
func NewPuller(p *core.Process) *Puller {
	return &Puller{p: p, tracked: make(map[*Handle]struct{}), handshakes: make(map[string]bool)}
}

// Decode is the part of a decode leg that pulls the blocks of a handle. Without a handle it is the leg
// of a request that one engine serves alone.
type Decode struct {
	core.WholeLeg
	puller *Puller
	Handle *Handle // nil: there is nothing to pull
}

// NewDecode returns the leg that pulls the blocks of h.
func NewDecode(p *Puller, h *Handle) Decode { return Decode{puller: p, Handle: h} }

// PrefillCached implements core.PrefillReporter.
func (g *Decode) PrefillCached() *int {
	if g.Handle == nil {
		return nil
	}
	return g.Handle.PrefillCached
}

// Submit queues the sequence that pulls; the other sequences of n find its blocks in the cache. An
// incomplete handle has the effect of Options.Incomplete.
func (g *Decode) Submit(r *core.Rank, j *core.Job) {
	h := g.Handle
	if h != nil && h.incomplete() {
		r.Counters.Incomplete++
		g.Handle, h = nil, nil // there is no prefill to notify
		switch r.Process.Options.Incomplete {
		case "crash":
			r.Fail(j, 500, core.DeadMessage)
			go r.Process.Crash()
			return
		case "error":
			r.Fail(j, 500, "Internal server error")
			return
		}
	}
	if h != nil && !h.usable() {
		g.Handle, h = nil, nil // vLLM logs a warning and computes the prompt itself
	}
	if h == nil {
		r.Queue(j.Seqs...)
		return
	}
	r.Queue(j.Seqs[0])
	g.puller.track(h)
}

// OnAdmitted starts the transfer for s, which has its blocks, unless the local cache makes it
// unnecessary.
func (g *Decode) OnAdmitted(r *core.Rank, s *core.Seq) bool {
	h := g.Handle
	if h == nil {
		return false
	}
	remote := h.NumTokens
	if remote <= 0 || remote > len(s.Prompt) {
		remote = len(s.Prompt)
	}
	remote = min(remote, len(s.Prompt)-1)
	if remote <= s.Local() {
		r.SkipTransfer(s)
		g.puller.release(h)
		r.QueueSiblings(s)
		return false
	}
	r.Transfer(s)
	f, moved := r.Process.HandoverFault(s.Job), remote-s.Local()
	r.Process.Go(func() {
		out := pullFailed
		if g.puller.injectFault(h, f) {
			// vLLM does not notify prefill of a failed transfer (0.32,
			// _handle_failed_transfer), but does of one whose request was aborted.
			select {
			case <-h.cancelled:
				g.puller.release(h)
			default:
			}
		} else {
			out = g.puller.pull(h, moved)
		}
		r.Post(func() { pullDone(r, s, remote, out) })
	})
	return true
}

// pullDone ends a transfer on the rank's goroutine.
func pullDone(r *core.Rank, s *core.Seq, remote int, out pullOutcome) {
	o := r.Process.Options
	fails := out == pullFailed || out == pullLeaseGone && o.Expired != "stale"
	tokens := remote
	if fails {
		tokens = 0
	}
	if !r.TransferDone(s, tokens, remote) {
		return
	}
	switch out {
	case pullFailed:
		r.Counters.PullsFailed++
	case pullLeaseGone:
		r.Counters.Garbage++
	}
	if !fails {
		r.QueueSiblings(s)
		return
	}
	r.Fail(s.Job, 500, "Internal server error")
	if out == pullLeaseGone && o.Expired == "crash" {
		go r.Process.Crash()
	}
}

// Cancel tells prefill at once if the request was never scheduled, as vLLM does.
func (g *Decode) Cancel(_ *core.Rank, j *core.Job) {
	h := g.Handle
	if h == nil {
		return
	}
	h.cancel.Do(func() { close(h.cancelled) })
	if !j.Seqs[0].Scheduled() {
		g.puller.release(h)
	}
}

// OnAborted notifies prefill of a cancelled request that is not streamed, in releases that do so even
// if it has notified before.
func (g *Decode) OnAborted(_ *core.Rank, j *core.Job) {
	if h := g.Handle; h != nil && !j.Params.Stream && g.puller.p.Options.VLLM.CancelReleases() {
		g.puller.p.Go(func() { g.puller.call(h.peer(), "/done", h.EngineID, []string{h.RequestID}) })
	}
}

// Release tells prefill, once, that the blocks are not needed.
func (g *Decode) Release() {
	if g.Handle != nil {
		g.puller.release(g.Handle)
	}
}

// OnRefused releases the blocks at prefill when decode gets an error before the engine schedules it, if the
// release does so.
func (g *Decode) OnRefused() {
	if h := g.Handle; h != nil && h.usable() && !h.incomplete() && g.puller.p.Options.VLLM.RefusalReleases() {
		g.puller.release(h)
	}
}

// track starts the heartbeats for a handle whose request is queued.
func (p *Puller) track(h *Handle) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tracked[h] = struct{}{}
	if !p.p.Options.VLLM.Heartbeats() {
		return
	}
	if !p.heartbeatRunning {
		p.heartbeatRunning = true
		p.p.Go(p.heartbeat)
	}
}

// heartbeat renews leases every sixth of a lease while any handle is tracked.
func (p *Puller) heartbeat() {
	t := time.NewTicker(max(p.p.Options.Lease/6, time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-p.p.Context.Done():
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
			k := key{h.peer(), h.EngineID}
			lists[k] = append(lists[k], h.RequestID)
		}
		p.mu.Unlock()
		for k, ids := range lists {
			p.call(k.peer, "/heartbeat", k.engine, ids)
		}
	}
}

// release notifies the prefill, once and without waiting, that the blocks are no longer
// needed.
func (p *Puller) release(h *Handle) { h.once.Do(func() { p.p.Go(func() { p.notify(h) }) }) }

func (p *Puller) notify(h *Handle) {
	p.mu.Lock()
	delete(p.tracked, h)
	p.mu.Unlock()
	p.call(h.peer(), "/done", h.EngineID, []string{h.RequestID})
}

// pullOutcome is the result of a pull.
type pullOutcome uint8

const (
	pullOK        pullOutcome = iota
	pullLeaseGone             // the prefill no longer has the blocks
	pullFailed                // no response in time, or not the engine that the handle names
)

// call posts to a peer's side channel.
func (p *Puller) call(peer, path, engine string, ids []string) (reply core.LeaseReply, err error) {
	err = p.p.Call(p.p.Context, "POST", peer, path, core.LeaseCall{EngineID: engine, RequestIDs: ids}, &reply)
	return reply, err
}

// injectFault applies a fault of the hand-over and reports whether the pull fails.
func (p *Puller) injectFault(h *Handle, f *faults.Fault) bool {
	if f == nil {
		return false
	}
	ctx, cancel := context.WithCancel(p.p.Context)
	defer cancel()
	p.p.Go(func() {
		select {
		case <-h.cancelled:
			cancel()
		case <-ctx.Done():
		}
	})
	return !core.FaultTransfer(ctx, f)
}

// pull reads the blocks: handshake, check that they are there, wait for the time of the
// bytes, notify.
func (p *Puller) pull(h *Handle, tokens int) pullOutcome {
	o := p.p.Options
	deadline := time.Now().Add(o.PullTimeout)
	peer := h.peer()
	p.mu.Lock()
	first := !p.handshakes[h.EngineID]
	if len(p.handshakes) > 4096 {
		clear(p.handshakes)
	}
	p.handshakes[h.EngineID] = true
	p.mu.Unlock()
	if first && !p.sleep(h, p.p.Handshake()) {
		p.release(h)
		return pullFailed
	}
	for {
		reply, err := p.call(peer, "/read", h.EngineID, []string{h.RequestID})
		if err != nil {
			if time.Now().After(deadline) || !p.sleep(h, min(o.PullTimeout/10, 100*time.Millisecond)) {
				p.release(h)
				return pullFailed
			}
			continue
		}
		p.sleep(h, p.p.TransferTime(tokens))
		h.once.Do(func() { p.notify(h) })
		if !reply.Held {
			return pullLeaseGone
		}
		return pullOK
	}
}

// sleep returns false if the job is dropped or the incarnation ends.
func (p *Puller) sleep(h *Handle, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-h.cancelled:
	case <-p.p.Context.Done():
	}
	return false
}
