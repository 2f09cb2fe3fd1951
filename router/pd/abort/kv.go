package abort

import (
	"math"
	"time"

	"sluice/router/kvtransfer/sidechannel"
)

// kvState says which party is responsible for the KV blocks behind a handle.
type kvState uint8

const (
	// kvNone: prefill has returned no handle in this attempt.
	kvNone kvState = iota
	// kvHeld: the prefill engine keeps the blocks, and no decode engine has seen the handle.
	kvHeld
	// kvSent: a decode engine has the handle but has not shown yet that it has the blocks.
	kvSent
	// kvFetched: the decode engine has the blocks or is responsible for them. The router has
	// nothing left to do.
	kvFetched
	// kvReclaimed: the router has requested the release of the blocks, or leaves them to the lease
	// because it cannot request it.
	kvReclaimed

	kvStates
)

// Event is what happens to the blocks of a handle.
type Event uint8

const (
	Acquired Event = iota // prefill answered with a handle
	// Unsent: a decode leg failed before its engine had received any of it.
	Unsent
	// HeadCame: the decode engine began a stream, but no event has arrived.
	HeadCame
	// Decoded: the decode engine answered or generated a token, or it notifies prefill itself
	// because it refused the request or sees the end of its connection.
	Decoded
	// Dropped: the decode engine has dropped the request and may not have notified prefill.
	Dropped
	// GivenUp: the router gave up a decode stream between its head and its first event. The
	// engine may be about to admit the request.
	GivenUp
	// Expired: prefill's lease has expired, so there is nothing left to release.
	Expired
	// Abandoned: the attempt or the request is over.
	Abandoned

	kvEvents
)

// kvAction is what the router does with the lease of the handle.
type kvAction uint8

const (
	kvNothing      kvAction = iota
	kvStopRenewal           // Stop the renewal; decode is responsible for the blocks
	kvAbandon               // Stop the renewal and make prefill release the blocks
	kvReclaim               // make prefill release blocks that a decode engine knew of
	kvReclaimAfter          // like kvReclaim, after decode has had time to notify prefill
)

type kvTransition struct {
	next   kvState
	action kvAction
}

// kvTransitions has the transition of every event in every state. No attempt gets a second handle
// while one is held or sent; if it did, the older one would end as abandoned.
var kvTransitions = [kvStates][kvEvents]kvTransition{
	kvNone: {
		Acquired: {kvHeld, kvNothing}, Unsent: {kvNone, kvNothing}, HeadCame: {kvNone, kvNothing}, Decoded: {kvNone, kvNothing},
		Dropped: {kvNone, kvNothing}, GivenUp: {kvNone, kvNothing}, Expired: {kvNone, kvNothing}, Abandoned: {kvNone, kvNothing},
	},
	kvHeld: {
		Acquired: {kvHeld, kvAbandon}, Unsent: {kvHeld, kvNothing}, HeadCame: {kvSent, kvNothing}, Decoded: {kvFetched, kvStopRenewal},
		Dropped: {kvReclaimed, kvReclaim}, GivenUp: {kvReclaimed, kvReclaimAfter}, Expired: {kvFetched, kvStopRenewal}, Abandoned: {kvReclaimed, kvAbandon},
	},
	kvSent: {
		Acquired: {kvHeld, kvReclaim}, Unsent: {kvSent, kvNothing}, HeadCame: {kvSent, kvNothing}, Decoded: {kvFetched, kvStopRenewal},
		Dropped: {kvReclaimed, kvReclaim}, GivenUp: {kvReclaimed, kvReclaimAfter}, Expired: {kvFetched, kvStopRenewal}, Abandoned: {kvReclaimed, kvReclaim},
	},
	kvFetched: {
		Acquired: {kvHeld, kvNothing}, Unsent: {kvFetched, kvNothing}, HeadCame: {kvFetched, kvNothing}, Decoded: {kvFetched, kvNothing},
		Dropped: {kvFetched, kvNothing}, GivenUp: {kvFetched, kvNothing}, Expired: {kvFetched, kvNothing}, Abandoned: {kvFetched, kvNothing},
	},
	kvReclaimed: {
		Acquired: {kvHeld, kvNothing}, Unsent: {kvReclaimed, kvNothing}, HeadCame: {kvReclaimed, kvNothing}, Decoded: {kvReclaimed, kvNothing},
		Dropped: {kvReclaimed, kvNothing}, GivenUp: {kvReclaimed, kvNothing}, Expired: {kvReclaimed, kvNothing}, Abandoned: {kvReclaimed, kvNothing},
	},
}

// KV is the state of a handle's blocks and the lease by which the router renews or releases
// them. The request owns it until the front relays decode's stream; the stream owns it from then
// on. The zero value has no handle.
type KV struct {
	lease *sidechannel.Lease // nil without a side channel; the state machine runs nevertheless
	grace int32              // delay of kvReclaimAfter, in microseconds
	state kvState
	// early is the rule of PhaseStream, for a stream that ends before its first event.
	early ReclaimRule
}

// Acquire applies Acquired to a handle with the given lease.
func (h *KV) Acquire(lease *sidechannel.Lease) {
	h.On(Acquired)
	h.lease = lease
}

// On applies an event and performs the action of its transition.
func (h *KV) On(event Event) {
	t := kvTransitions[h.state][event]
	h.state = t.next
	switch t.action {
	case kvStopRenewal:
		h.lease.StopRenewal()
	case kvAbandon:
		h.lease.Abandon()
	case kvReclaim:
		h.lease.Reclaim()
	case kvReclaimAfter:
		reclaimLeaseAfter(h.lease, time.Duration(h.grace)*time.Microsecond)
	}
	if h.state == kvFetched || h.state == kvReclaimed {
		h.lease = nil
	}
}

// Reclaim carries out the rule of a phase in which the client disconnected. received says that the
// decode engine has received its leg, as far as the router knows; grace is that of ReclaimAfterGrace.
// For ReclaimByRelease it leaves the blocks to the caller, who sends a leg or applies Abandoned.
func (h *KV) Reclaim(rule ReclaimRule, received bool, grace time.Duration) {
	switch {
	case rule == ReclaimByRelease:
	case rule == ReclaimByDecode && !received:
		h.On(Dropped)
	case rule == ReclaimAfterGrace:
		h.setGrace(grace)
		h.On(GivenUp)
	default:
		h.On(Decoded) // nothing is leased, or decode is responsible
	}
}

func (h *KV) setGrace(grace time.Duration) { h.grace = int32(min(grace.Microseconds(), math.MaxInt32)) }

// GiveUp ends the blocks of a stream that ended before its first event, by the rule of TakeForStream.
func (h *KV) GiveUp() { h.Reclaim(h.early, true, time.Duration(h.grace)*time.Microsecond) }

// IsHeld reports whether the prefill engine keeps the blocks and no decode engine has seen the handle.
func (h *KV) IsHeld() bool { return h.state == kvHeld }

// Held returns the lease while no decode engine has seen the handle, else nil.
func (h *KV) Held() *sidechannel.Lease {
	if h.state != kvHeld {
		return nil
	}
	return h.lease
}

// TakeForStream transfers the state to a stream, with the rule and the grace for its early end.
func (h *KV) TakeForStream(rule ReclaimRule, grace time.Duration) KV {
	given := *h
	given.early = rule
	given.setGrace(grace)
	*h = KV{}
	return given
}

// reclaimLeaseAfter releases the blocks of a decode that the router gave up between its head and
// its first event. It first waits until the engine has noticed the cancel: the engine notifies
// prefill itself if it had admitted the request by then.
func reclaimLeaseAfter(h *sidechannel.Lease, grace time.Duration) {
	if !h.CanRelease() {
		h.StopRenewal()
		return
	}
	time.AfterFunc(grace, h.Reclaim)
}
