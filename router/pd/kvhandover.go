package pd

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

// kvEvent is what happens to the blocks of a handle.
type kvEvent uint8

const (
	kvAcquired kvEvent = iota // prefill answered with a handle
	// kvUnsent: a decode leg failed before its engine had received any of it.
	kvUnsent
	// kvHeadCame: the decode engine began a stream, but no event has arrived.
	kvHeadCame
	// kvDecoded: the decode engine answered or generated a token, or it notifies prefill itself
	// because it refused the request or sees the end of its connection.
	kvDecoded
	// kvDropped: the decode engine has dropped the request and may not have notified prefill.
	kvDropped
	// kvGivenUp: the router gave up a decode stream between its head and its first event. The
	// engine may be about to admit the request.
	kvGivenUp
	// kvExpired: prefill's lease has expired, so there is nothing left to release.
	kvExpired
	// kvAbandoned: the attempt or the request is over.
	kvAbandoned

	kvEvents
)

// kvAction is what the router does with the lease of the handle.
type kvAction uint8

const (
	kvNothing      kvAction = iota
	kvHandOff               // stop the renewal; decode is responsible for the blocks
	kvAbandon               // stop the renewal and make prefill release the blocks
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
		kvAcquired: {kvHeld, kvNothing}, kvUnsent: {kvNone, kvNothing}, kvHeadCame: {kvNone, kvNothing}, kvDecoded: {kvNone, kvNothing},
		kvDropped: {kvNone, kvNothing}, kvGivenUp: {kvNone, kvNothing}, kvExpired: {kvNone, kvNothing}, kvAbandoned: {kvNone, kvNothing},
	},
	kvHeld: {
		kvAcquired: {kvHeld, kvAbandon}, kvUnsent: {kvHeld, kvNothing}, kvHeadCame: {kvSent, kvNothing}, kvDecoded: {kvFetched, kvHandOff},
		kvDropped: {kvReclaimed, kvReclaim}, kvGivenUp: {kvReclaimed, kvReclaimAfter}, kvExpired: {kvFetched, kvHandOff}, kvAbandoned: {kvReclaimed, kvAbandon},
	},
	kvSent: {
		kvAcquired: {kvHeld, kvReclaim}, kvUnsent: {kvSent, kvNothing}, kvHeadCame: {kvSent, kvNothing}, kvDecoded: {kvFetched, kvHandOff},
		kvDropped: {kvReclaimed, kvReclaim}, kvGivenUp: {kvReclaimed, kvReclaimAfter}, kvExpired: {kvFetched, kvHandOff}, kvAbandoned: {kvReclaimed, kvReclaim},
	},
	kvFetched: {
		kvAcquired: {kvHeld, kvNothing}, kvUnsent: {kvFetched, kvNothing}, kvHeadCame: {kvFetched, kvNothing}, kvDecoded: {kvFetched, kvNothing},
		kvDropped: {kvFetched, kvNothing}, kvGivenUp: {kvFetched, kvNothing}, kvExpired: {kvFetched, kvNothing}, kvAbandoned: {kvFetched, kvNothing},
	},
	kvReclaimed: {
		kvAcquired: {kvHeld, kvNothing}, kvUnsent: {kvReclaimed, kvNothing}, kvHeadCame: {kvReclaimed, kvNothing}, kvDecoded: {kvReclaimed, kvNothing},
		kvDropped: {kvReclaimed, kvNothing}, kvGivenUp: {kvReclaimed, kvNothing}, kvExpired: {kvReclaimed, kvNothing}, kvAbandoned: {kvReclaimed, kvNothing},
	},
}

// kvHandover is the state of a handle's blocks and the lease by which the router renews or releases
// them. The request owns it until the front relays decode's stream; the stream owns it from then
// on. The zero value has no handle.
type kvHandover struct {
	lease *sidechannel.Lease // nil without a side channel; the state machine runs nevertheless
	grace int32              // delay of kvReclaimAfter, in microseconds
	state kvState
}

// acquire applies kvAcquired to a handle with the given lease.
func (h *kvHandover) acquire(lease *sidechannel.Lease) {
	h.on(kvAcquired)
	h.lease = lease
}

// on applies an event and performs the action of its transition.
func (h *kvHandover) on(event kvEvent) {
	t := kvTransitions[h.state][event]
	h.state = t.next
	switch t.action {
	case kvHandOff:
		h.lease.HandOff()
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

// setGrace sets the delay of kvReclaimAfter.
func (h *kvHandover) setGrace(d time.Duration) {
	h.grace = int32(min(d.Microseconds(), math.MaxInt32))
}

// held returns the lease while no decode engine has seen the handle, else nil.
func (h *kvHandover) held() *sidechannel.Lease {
	if h.state != kvHeld {
		return nil
	}
	return h.lease
}

// handOver transfers the state to a stream and sets the grace for its early end.
func (h *kvHandover) handOver(grace time.Duration) kvHandover {
	given := *h
	given.setGrace(grace)
	*h = kvHandover{}
	return given
}
