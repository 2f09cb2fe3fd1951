package nixl

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Board is the memory in which transfers' ends are told: one slot of 64 bytes is
// lent to each request, and whoever moves its KV writes a record there, one-sided,
// or names slot and nonce in a notification. A record counts when version, check,
// sequence, nonce and request all fit the ticket; a late, torn or forged one does
// not.
//
// HandOut, Look, Complete and Release take no lock, call no C and allocate nothing.
//
// Memory order: a slot's ticket is written before its bit is set; the agent's
// thread reads the bit first (acquire), then the ticket. A slot's state moves by
// compare-and-swap only, with the sequence in it, so of a record seen at the same
// time by the thread, by Look and by Complete one wins, and an end that comes for an
// earlier ticket finds another sequence.
type Board struct {
	id      uint32
	agent   *Agent // nil: filled by notifications alone
	memory  *Memory
	control []byte
	on      func(Ticket, Completion)

	slots   [][8]atomic.Uint64
	words   *atomic.Uint64
	tickets []ticketCell
	bits    []atomic.Uint64
	entries []entry
	free    *indexQueue
	cursor  atomic.Uint64 // of Expire

	refused atomic.Uint64
}

// ticketCell mirrors struct sluice_ticket.
type ticketCell struct {
	sequence, nonce, request atomic.Uint64
	_                        uint64 // the thread's
}

// entry is our side of a slot. state is the sequence and, in its two lowest bits,
// one of the constants below.
type entry struct {
	state   atomic.Uint64
	request atomic.Uint64
	expires atomic.Int64 // Unix ns
	result  result
}

// result is a completion: written while the slot is claimed, read when it has
// landed. In atomics, because a Look with an old ticket may come at any time.
type result [5]atomic.Uint64

func (r *result) store(c Completion) {
	for i, v := range [...]uint64{c.Request, uint64(c.Worker) | uint64(c.Rank)<<32, uint64(uint32(c.Status)), c.Bytes, uint64(c.Took)} {
		r[i].Store(v)
	}
}

func (r *result) load() Completion {
	who := r[1].Load()
	return Completion{Request: r[0].Load(), Worker: uint32(who), Rank: uint32(who >> 32), Status: int32(uint32(r[2].Load())),
		Bytes: r[3].Load(), Took: time.Duration(r[4].Load())}
}

const (
	slotFree uint64 = iota
	slotOut
	slotClaimed
	slotLanded
)

// State is what is known of a ticket.
type State int

// The states of a ticket.
const (
	Pending State = iota // handed out, nothing valid has come
	Landed               // its completion is there
	Ended                // released or expired
)

// phase is a slot's state while it is lent with a sequence.
func phase(sequence, p uint64) uint64 { return sequence<<2 | p }

const boardHead = 64 // struct sluice_board

// MaxSlots is the largest board.
const MaxSlots = 1 << 20

// NewBoard makes a board of slots (a multiple of 64) and registers it with the
// agent, whose thread then watches it; without an agent it is filled by
// notifications alone. on is told of every completion that the thread or
// Complete finds, on their goroutine; it may be nil. A board lasts as long as its agent.
func NewBoard(ctx context.Context, a *Agent, slots int, on func(Ticket, Completion)) (*Board, error) {
	if slots <= 0 || slots%64 != 0 || slots > MaxSlots {
		return nil, fmt.Errorf("nixl: a board of %d slots: want a multiple of 64, at most %d", slots, MaxSlots)
	}
	m, err := boardMemory(a, slots*recordBytes)
	if err != nil {
		return nil, err
	}
	controlBytes := boardHead + slots*int(unsafe.Sizeof(ticketCell{})) + slots/8
	var control []byte
	if m.shared != nil {
		control, err = m.shared.take(controlBytes)
	} else {
		control, err = mapShared("sluice-board", controlBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("nixl: cannot map a board's control block: %w", err)
	}
	base := unsafe.Pointer(unsafe.SliceData(control))
	b := &Board{
		id: boardID.Add(1), agent: a, memory: m, control: control, on: on,
		slots:   slotsOf(m.bytes)[:slots],
		words:   (*atomic.Uint64)(base),
		tickets: unsafe.Slice((*ticketCell)(unsafe.Add(base, boardHead)), slots),
		bits:    unsafe.Slice((*atomic.Uint64)(unsafe.Add(base, boardHead+slots*int(unsafe.Sizeof(ticketCell{})))), slots/64),
		entries: make([]entry, slots),
		free:    newIndexQueue(slots),
	}
	for i := range slots {
		b.free.push(uint32(i))
	}
	if a == nil {
		return b, nil
	}
	if err := a.Register(ctx, m); err != nil {
		return nil, err
	}
	c := command{op: opBoard, arg: [3]uint64{uint64(uintptr(base)), m.address, uint64(slots)}, board: b}
	// Booked before it is told: the thread may report at once.
	a.mu.Lock()
	a.boards = append(a.boards, b)
	n := len(a.boards)
	a.mu.Unlock()
	ans, err := a.call(ctx, &c, fmt.Sprintf("watch a board of %d slots", slots))
	if err == nil && ans.handle != uint64(n-1) {
		err = fmt.Errorf("nixl: board %d was booked as %d: boards are made one after another", ans.handle, n-1)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// orphan is told when the board's agent has ended, so that nothing but holders of
// tickets uses its memory: that goes back when they are gone too. Without it a tier
// whose agent fails again and again would run out of mappings.
func (b *Board) orphan() {
	m := b.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shared != nil || m.dirty || m.bytes == nil {
		return
	}
	type loan struct{ control, slots []byte }
	runtime.AddCleanup(b, func(l loan) {
		_ = unix.Munmap(l.control)
		keepHostMemory(l.slots)
	}, loan{b.control, m.bytes})
}

var boardID atomic.Uint32

// ID tells the boards of this process apart, from 1 on: a ticket of one means nothing on
// another.
func (b *Board) ID() uint32 { return b.id }

// Slots is how many requests can be waited for at once.
func (b *Board) Slots() int { return len(b.entries) }

// Refused counts notifications that were refused; the agent's Counters.Unmatched has
// the records.
func (b *Board) Refused() uint64 { return b.refused.Load() }

// Remote is where the ticket's record is to be written.
func (b *Board) Remote(t Ticket) Remote { return b.memory.Remote(int(t.Slot)*recordBytes, recordBytes) }

// HandOut lends a slot to a request until Release, or until Expire after the given
// time. False when all are lent. The slot that has rested longest is taken, so that
// a late write for its last ticket finds as little as can be.
func (b *Board) HandOut(request uint64, until time.Time) (Ticket, bool) {
	i, ok := b.free.pop()
	if !ok {
		return Ticket{}, false
	}
	e := &b.entries[i]
	// The global source is ChaCha8, seeded by the system, per thread and without a
	// lock: a nonce does not tell the next.
	t := Ticket{Slot: i, Sequence: e.state.Load()>>2 + 1, Nonce: rand.Uint64(), Request: request}
	b.slots[i][7].Store(0)
	b.tickets[i].nonce.Store(t.Nonce)
	b.tickets[i].request.Store(request)
	b.tickets[i].sequence.Store(t.Sequence)
	e.request.Store(request)
	e.expires.Store(until.UnixNano())
	e.state.Store(phase(t.Sequence, slotOut))
	word := uint64(i / 64)
	for n := b.words.Load(); n <= word && !b.words.CompareAndSwap(n, word+1); n = b.words.Load() {
	}
	b.bits[word].Or(1 << (i % 64))
	if b.agent != nil {
		b.agent.driver.expect(1)
	}
	return t, true
}

// Look answers what is known of a ticket, by loads from the slot itself.
func (b *Board) Look(t Ticket) (Completion, State) {
	if int(t.Slot) >= len(b.entries) {
		return Completion{}, Ended
	}
	e := &b.entries[t.Slot]
	switch e.state.Load() {
	case phase(t.Sequence, slotLanded):
		c := e.result.load()
		if e.state.Load() != phase(t.Sequence, slotLanded) {
			return Completion{}, Ended
		}
		return c, Landed
	case phase(t.Sequence, slotClaimed):
		return Completion{}, Pending
	case phase(t.Sequence, slotOut):
		var w words
		w.load(&b.slots[t.Slot])
		if w.verify(t) != nil {
			return Completion{}, Pending
		}
		if c := w.completion(); b.claim(t, c) {
			return c, Landed
		}
		return Completion{}, Pending
	}
	return Completion{}, Ended
}

// Complete ends a ticket by what a notification told: the slot and the nonce that
// went out with the request. The error is ErrForged for a slot or nonce that was
// not given to anyone now, which is also what a notification that comes after its
// ticket's end finds; ErrLate for a second one.
func (b *Board) Complete(slot uint32, nonce uint64, c Completion) error {
	err := error(ErrForged)
	if int(slot) < len(b.entries) {
		t, out := b.current(slot)
		if c.Request = t.Request; t.Nonce == nonce && t.Sequence != 0 {
			if out && b.claim(t, c) {
				b.tell(t, c)
				return nil
			}
			err = ErrLate
		}
	}
	b.refused.Add(1)
	return err
}

// current is the ticket that a slot is lent to, or was.
func (b *Board) current(slot uint32) (Ticket, bool) {
	s := b.entries[slot].state.Load()
	return Ticket{Slot: slot, Sequence: s >> 2, Nonce: b.tickets[slot].nonce.Load(), Request: b.entries[slot].request.Load()}, s&3 == slotOut
}

// landed is told by the agent's thread of a record that fits its slot's ticket. The
// slot is not looked at again: its writer, or another, may have written to it since.
func (b *Board) landed(slot int, w words) {
	if slot < 0 || slot >= len(b.entries) {
		return
	}
	t, out := b.current(uint32(slot))
	if !out || t.Sequence != w[7] {
		return
	}
	if w.verify(t) != nil {
		b.refused.Add(1) // an agent in a process of its own that has gone wrong
		return
	}
	if c := w.completion(); b.claim(t, c) {
		b.tell(t, c)
	}
}

// claim makes c the ticket's completion; one caller wins.
func (b *Board) claim(t Ticket, c Completion) bool {
	e := &b.entries[t.Slot]
	if !e.state.CompareAndSwap(phase(t.Sequence, slotOut), phase(t.Sequence, slotClaimed)) {
		return false
	}
	e.result.store(c)
	b.unwatch(t)
	e.state.Store(phase(t.Sequence, slotLanded))
	return true
}

func (b *Board) tell(t Ticket, c Completion) {
	if b.on != nil {
		b.on(t, c)
	}
}

// unwatch ends the looking at a slot; once per ticket.
func (b *Board) unwatch(t Ticket) {
	b.bits[t.Slot/64].And(^(uint64(1) << (t.Slot % 64)))
	if b.agent != nil {
		b.agent.driver.expect(-1)
	}
}

// Release ends a ticket, with or without a completion. Later calls do nothing.
func (b *Board) Release(t Ticket) {
	if int(t.Slot) >= len(b.entries) {
		return
	}
	e := &b.entries[t.Slot]
	for {
		switch s := e.state.Load(); s {
		case phase(t.Sequence, slotOut):
			if !e.state.CompareAndSwap(s, phase(t.Sequence, slotClaimed)) {
				continue
			}
			b.unwatch(t)
		case phase(t.Sequence, slotLanded):
			if !e.state.CompareAndSwap(s, phase(t.Sequence, slotClaimed)) {
				continue
			}
		case phase(t.Sequence, slotClaimed):
			continue // a few stores from landed, or from released by another
		default:
			return
		}
		e.state.Store(phase(t.Sequence, slotFree))
		b.free.push(t.Slot)
		return
	}
}

// Expire releases tickets whose time is over, looking at no more than limit slots;
// the next call goes on from there. It answers how many ended without a completion.
func (b *Board) Expire(now time.Time, limit int) int {
	n := 0
	for range min(limit, len(b.entries)) {
		i := uint32((b.cursor.Add(1) - 1) % uint64(len(b.entries)))
		e := &b.entries[i]
		s := e.state.Load()
		if s&3 == slotFree || e.expires.Load() > now.UnixNano() {
			continue
		}
		if e.state.Load() != s {
			continue
		}
		if s&3 == slotOut {
			n++
		}
		b.Release(Ticket{Slot: i, Sequence: s >> 2})
	}
	return n
}

// sweep looks at every lent slot, as the agent's thread does; the fake calls it.
func (b *Board) sweep() {
	for i := range b.entries {
		if t, out := b.current(uint32(i)); out {
			var w words
			if w.load(&b.slots[i]); w.verify(t) == nil {
				b.landed(i, w)
			}
		}
	}
}
