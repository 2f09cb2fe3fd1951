package pd

import (
	"math"
	"time"

	"sluice/router/kvtransfer/sidechannel"
)

// kvState says who answers for the KV blocks of a handle that a prefill engine gave.
type kvState uint8

const (
	// kvNone: prefill has given no handle in this attempt.
	kvNone kvState = iota
	// kvHeld: prefill's engine keeps the blocks, and no decode engine has seen the handle.
	kvHeld
	// kvSent: a decode engine has the handle, and has not shown yet that it has the blocks.
	kvSent
	// kvFetched: the decode engine has the blocks or answers for them. The router has nothing
	// left to do.
	kvFetched
	// kvReclaimed: the router has asked for the release of the blocks, or leaves them to the
	// lease where it cannot.
	kvReclaimed

	kvStates
)

// kvEvent is what happens to the blocks of a handle.
type kvEvent uint8

const (
	kvAcquired kvEvent = iota // prefill answered with a handle
	// kvUnsent: a decode leg failed before its engine had seen anything of it.
	kvUnsent
	// kvHeadCame: the decode engine began a stream, of which no event has come.
	kvHeadCame
	// kvDecoded: the decode engine answered, made a token, or tells prefill itself that it is
	// done: it refused the request, or the end of its connection shows it.
	kvDecoded
	// kvDropped: the decode engine has dropped the request and may not have told prefill.
	kvDropped
	// kvGivenUp: the router gave a decode stream up between its head and its first event. The
	// engine may be about to take the request in.
	kvGivenUp
	// kvExpired: prefill's lease is over; there is nothing left to release.
	kvExpired
	// kvAbandoned: the attempt or the request is over.
	kvAbandoned

	kvEvents
)

// kvAction is what the router does with the lease of the handle.
type kvAction uint8

const (
	kvNothing      kvAction = iota
	kvHandOff               // stop the renewal; the blocks are decode's
	kvAbandon               // stop the renewal, and have prefill release the blocks
	kvReclaim               // have prefill release blocks that a decode engine knew of
	kvReclaimAfter          // the same when the decode engine has had time to tell prefill
)

type kvTransition struct {
	next   kvState
	action kvAction
}

// kvTransitions has the transition of every event in every state. A handle that comes while
// another is held or sent (which no attempt does) ends the older one as an abandoned one.
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

// kvHandover is the state of a handle's blocks and the lease by which the router renews or
// releases them. The request has it until the front relays decode's stream, which has it
// then. The zero value has no handle.
type kvHandover struct {
	lease *sidechannel.Lease // nil: no side channel; the states count all the same
	grace int32              // microseconds that kvReclaimAfter waits
	state kvState
}

// acquire is kvAcquired for a handle with that lease.
func (h *kvHandover) acquire(lease *sidechannel.Lease) {
	h.on(kvAcquired)
	h.lease = lease
}

// on carries a transition out.
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

// setGrace sets how long kvReclaimAfter waits.
func (h *kvHandover) setGrace(d time.Duration) {
	h.grace = int32(min(d.Microseconds(), math.MaxInt32))
}

// held is the lease while no decode engine has seen the handle, else nil.
func (h *kvHandover) held() *sidechannel.Lease {
	if h.state != kvHeld {
		return nil
	}
	return h.lease
}

// handOver gives the state to a stream, which may wait for grace when it ends early.
func (h *kvHandover) handOver(grace time.Duration) kvHandover {
	given := *h
	given.setGrace(grace)
	*h = kvHandover{}
	return given
}
