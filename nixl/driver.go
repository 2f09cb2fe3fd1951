package nixl

import (
	"time"

	nativenixl "sluice/native/nixl"
)

// The operations and events; they mirror enum sluice_op and enum sluice_event.
const (
	opCreate uint32 = 1 + iota
	opBackend
	opPlugins
	opRegister
	opDeregister
	opMetadata
	opLoad
	opInvalidate
	opCheck
	opConnect
	opNotify
	opTransfer
	opCancel
	opBoard
	opStop
	opPoll // the thread's own poll for notifications
)

const (
	evDone uint32 = 1 + iota
	evNotif
	evPeerDown
	evBoard
)

var opNames = [...]string{"", "create the agent", "create the backend", "list plugins", "register memory", "deregister memory",
	"read its metadata", "load a peer's metadata", "drop a peer", "check a peer", "connect to a peer", "send a notification",
	"transfer", "cancel a transfer", "watch a board", "stop", "look for notifications"}

// command is one order to the owner of an agent. push copies data.
type command struct {
	op            uint32
	token, handle uint64
	arg           [3]uint64
	data          []byte

	// The objects behind the addresses in arg, which the fake needs.
	memory *Memory
	board  *CompletionBoard
}

// event is one answer or arrival. data is borrowed until the receiver returns.
type event struct {
	op            uint32
	status        Status
	token, handle uint64
	aux           uint32
	arg           [3]uint64
	data          []byte
}

// driver owns an agent: the C thread, or the fake. It calls its sink from one goroutine
// at a time.
type driver interface {
	// push submits a command without blocking; ErrFull if the ring is full.
	push(c *command) error
	// post is push for a notification that needs no answer; a command would escape to
	// the heap through this interface.
	post(peer uint64, message []byte) error
	// expect changes the number of completions that callers wait for.
	expect(delta int64)
	// busy returns the library call in progress and its duration; 0 outside the
	// library.
	busy() (op uint32, since time.Duration)
	counters() Counters
	// stop ends the driver after opStop was answered, and abandons it if it has not
	// ended by then. It reports whether the driver ended.
	stop(by time.Time) bool
}

// Counters are what the thread of an agent has counted.
type Counters struct {
	Unmatched uint64 // records on boards that match no CompletionSlot: late, forged or torn
	Unread    uint64 // notifications that could not be read: too long, or from an agent without a readable name
	Signals   uint64 // bit set of the signals whose handlers libraries replaced and the thread restored
	Stuck     uint64 // transfers that the library would not release
}

func (c Counters) add(d Counters) Counters {
	return Counters{Unmatched: c.Unmatched + d.Unmatched, Unread: c.Unread + d.Unread, Signals: c.Signals | d.Signals, Stuck: c.Stuck + d.Stuck}
}

// PollIntervals is how the thread of an agent waits.
type PollIntervals = nativenixl.PollIntervals
