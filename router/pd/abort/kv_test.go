package abort

import (
	"testing"
	"time"
)

// TestKVTransitions checks every event in every state of the table.
func TestKVTransitions(t *testing.T) {
	type row = [kvEvents]kvTransition
	stay := func(s kvState) (r row) {
		for e := range r {
			r[e] = kvTransition{s, kvNothing}
		}
		r[Acquired] = kvTransition{kvHeld, kvNothing}
		return r
	}
	held, sent := stay(kvHeld), stay(kvSent)
	held[Acquired].action = kvAbandon
	held[HeadCame].next = kvSent
	held[Abandoned] = kvTransition{kvReclaimed, kvAbandon}
	sent[Acquired].action = kvReclaim
	sent[Abandoned] = kvTransition{kvReclaimed, kvReclaim}
	for _, r := range []*row{&held, &sent} {
		r[Decoded] = kvTransition{kvFetched, kvStopRenewal}
		r[Expired] = kvTransition{kvFetched, kvStopRenewal}
		r[Dropped] = kvTransition{kvReclaimed, kvReclaim}
		r[GivenUp] = kvTransition{kvReclaimed, kvReclaimAfter}
	}
	for state, want := range [kvStates]row{kvNone: stay(kvNone), kvHeld: held, kvSent: sent, kvFetched: stay(kvFetched), kvReclaimed: stay(kvReclaimed)} {
		for event := range want {
			h := KV{state: kvState(state)}
			h.On(Event(event))
			if got := kvTransitions[state][event]; got != want[event] || h.state != want[event].next {
				t.Errorf("state %d, event %d: %v, state %d behind it; want %v", state, event, got, h.state, want[event])
			}
		}
	}
}

// TestKVHandoverEndsOnce checks for every state that, after any way to end a request, later events
// have nothing to do.
func TestKVHandoverEndsOnce(t *testing.T) {
	for state := kvState(0); state < kvStates; state++ {
		for _, end := range []Event{Decoded, Dropped, GivenUp, Expired, Abandoned} {
			h := KV{state: state}
			h.On(end)
			for event := Unsent; event < kvEvents; event++ {
				if a := kvTransitions[h.state][event].action; a != kvNothing {
					t.Errorf("state %d, behind its end by event %d: event %d does %d", state, end, event, a)
				}
			}
			if h.Held() != nil || h.state == kvHeld || h.state == kvSent {
				t.Errorf("state %d, event %d: blocks are still answered for (state %d)", state, end, h.state)
			}
		}
	}
}

func TestKVHandoverToStream(t *testing.T) {
	h := KV{state: kvSent}
	s := h.TakeForStream(ReclaimAfterGrace, 250*time.Millisecond)
	if h.state != kvNone || s.state != kvSent || s.grace != 250000 {
		t.Errorf("%+v is left, %+v is the stream's", h, s)
	}
	if s = h.TakeForStream(ReclaimAfterGrace, 24*time.Hour); s.grace <= 0 {
		t.Errorf("a long grace is %d", s.grace)
	}
}
