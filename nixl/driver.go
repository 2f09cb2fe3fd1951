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
	opPoll // the thread's own look for notifications
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

// command is one order to the owner of an agent. data is copied by push.
type command struct {
	op            uint32
	token, handle uint64
	arg           [3]uint64
	data          []byte

	// What the addresses in arg stand for: the fake has no other way to them.
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

// driver is what owns an agent: the C thread, or the fake. It calls the sink it
// was made with from one goroutine at a time.
type driver interface {
	// push hands a command over without blocking; ErrFull when there is no place.
	push(c *command) error
	// post is push of a notification that nobody waits for; a command would escape
	// to the heap on its way through this interface.
	post(peer uint64, message []byte) error
	// expect adds to the number of completions someone waits for.
	expect(delta int64)
	// busy is the call the library is in, and since when; 0 outside of it.
	busy() (op uint32, since time.Duration)
	counters() Counters
	// stop ends the driver after opStop was answered, or leaves it behind when it
	// does not end by then; it answers whether it ended.
	stop(by time.Time) bool
}

// Counters tell what an agent's owner has seen.
type Counters struct {
	Unmatched uint64 // records on boards that match no ticket: late, forged or torn
	Unread    uint64 // notifications that could not be read: too long, or from an agent without a readable name
	Signals   uint64 // bit set of signals that had been taken from Go and were given back
	Stuck     uint64 // transfers that the library would not release
}

func (c Counters) add(d Counters) Counters {
	return Counters{Unmatched: c.Unmatched + d.Unmatched, Unread: c.Unread + d.Unread, Signals: c.Signals | d.Signals, Stuck: c.Stuck + d.Stuck}
}

// PollIntervals is how an agent's thread waits.
type PollIntervals = nativenixl.PollIntervals
