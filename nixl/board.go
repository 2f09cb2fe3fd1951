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

// CompletionBoard is the memory in which the ends of transfers are recorded. A slot of
// 64 bytes is assigned to each request; the engine that moves its KV writes a record there,
// one-sided, or names the slot and its nonce in a notification. A record counts if
// version, check, sequence, nonce and request all match the slot's cell; late, torn
// and forged ones do not.
//
// Acquire, Poll, CompleteNotified and Release take no lock, call no C and allocate
// nothing.
//
// Memory order: a slot's cell is written before its bit is set; the agent's thread
// reads the bit first (acquire), then the cell. A slot's state changes only by
// compare-and-swap and includes the sequence, so if the thread, Poll and
// CompleteNotified see a record at the same time, one of them wins, and a completion
// for an earlier CompletionSlot finds another sequence.
type CompletionBoard struct {
	id           uint32
	agent        *Agent // nil: completed by notifications alone
	memory       *Memory
	control      []byte
	onCompletion func(CompletionSlot, Completion)

	records   [][8]atomic.Uint64
	words     *atomic.Uint64
	slotCells []slotCell
	bits      []atomic.Uint64
	entries   []entry
	free      *indexQueue
	cursor    atomic.Uint64 // position of Expire

	refused atomic.Uint64
}

// slotCell mirrors struct sluice_slot_cell.
type slotCell struct {
	sequence, nonce, request atomic.Uint64
	_                        uint64 // owned by the agent's thread
}

// entry is Go's side of a slot. state is the sequence and, in its two lowest bits, one
// of the constants below.
type entry struct {
	state   atomic.Uint64
	request atomic.Uint64
	expires atomic.Int64 // Unix ns
	result  result
}

// result is a completion. It is written while the slot is claimed and read once it is
// complete. Its fields are atomic, because Poll with an old CompletionSlot may run at any time.
type result [5]atomic.Uint64

func (r *result) store(c Completion) {
	for i, v := range [...]uint64{c.Request, uint64(c.Worker) | uint64(c.Rank)<<32, uint64(uint32(c.Status)), c.Bytes, uint64(c.Duration)} {
		r[i].Store(v)
	}
}

func (r *result) load() Completion {
	who := r[1].Load()
	return Completion{Request: r[0].Load(), Worker: uint32(who), Rank: uint32(who >> 32), Status: int32(uint32(r[2].Load())),
		Bytes: r[3].Load(), Duration: time.Duration(r[4].Load())}
}

const (
	slotFree uint64 = iota
	slotLeased
	slotClaimed
	slotCompleted
)

// State is the state of a CompletionSlot.
type State int

// The states of a CompletionSlot.
const (
	Pending   State = iota // acquired; no valid record has arrived
	Completed              // its completion has arrived
	Released               // released or expired
)

// phase is the state of a slot within one sequence.
func phase(sequence, p uint64) uint64 { return sequence<<2 | p }

const boardHead = 64 // struct sluice_board

// MaxSlots is the largest size of a board.
const MaxSlots = 1 << 20

// NewCompletionBoard makes a board of slots (a multiple of 64) and registers it with
// the agent, whose thread then watches it; without an agent it is completed by
// notifications alone. on is called for every completion, on the goroutine that found
// it; it may be nil. The board lasts as long as its agent.
func NewCompletionBoard(ctx context.Context, a *Agent, slots int, on func(CompletionSlot, Completion)) (*CompletionBoard, error) {
	if slots <= 0 || slots%64 != 0 || slots > MaxSlots {
		return nil, fmt.Errorf("nixl: cannot make a board of %d slots: want a multiple of 64, at most %d", slots, MaxSlots)
	}
	m, err := boardMemory(a, slots*recordBytes)
	if err != nil {
		return nil, err
	}
	controlBytes := boardHead + slots*int(unsafe.Sizeof(slotCell{})) + slots/8
	var control []byte
	if m.shared != nil {
		control, err = m.shared.alloc(controlBytes)
	} else {
		control, err = mapShared("sluice-board", controlBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("nixl: cannot map a board's control block: %w", err)
	}
	base := unsafe.Pointer(unsafe.SliceData(control))
	b := &CompletionBoard{
		id: boardID.Add(1), agent: a, memory: m, control: control, onCompletion: on,
		records:   slotsOf(m.bytes)[:slots],
		words:     (*atomic.Uint64)(base),
		slotCells: unsafe.Slice((*slotCell)(unsafe.Add(base, boardHead)), slots),
		bits:      unsafe.Slice((*atomic.Uint64)(unsafe.Add(base, boardHead+slots*int(unsafe.Sizeof(slotCell{})))), slots/64),
		entries:   make([]entry, slots),
		free:      newIndexQueue(slots),
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
	// Recorded before the thread knows the board, because the thread may report at
	// once.
	a.mu.Lock()
	a.completionBoards = append(a.completionBoards, b)
	n := len(a.completionBoards)
	a.mu.Unlock()
	ans, err := a.call(ctx, &c, fmt.Sprintf("watch a board of %d slots", slots))
	if err == nil && ans.handle != uint64(n-1) {
		err = fmt.Errorf("nixl: board %d was recorded as %d: boards must be made one after another", ans.handle, n-1)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// agentClosed is called when the board's agent has ended, so that only holders of
// CompletionSlots use its memory, which is freed when they are gone too. Otherwise a tier whose
// agent fails repeatedly would run out of mappings.
func (b *CompletionBoard) agentClosed() {
	m := b.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shared != nil || m.unreusable || m.bytes == nil {
		return
	}
	type loan struct{ control, slots []byte }
	runtime.AddCleanup(b, func(l loan) {
		_ = unix.Munmap(l.control)
		poolHostMemory(l.slots)
	}, loan{b.control, m.bytes})
}

var boardID atomic.Uint32

// ID identifies the board in this process, from 1 on: a CompletionSlot is valid on its own
// board only.
func (b *CompletionBoard) ID() uint32 { return b.id }

// Slots returns how many requests can wait at once.
func (b *CompletionBoard) Slots() int { return len(b.entries) }

// Refused returns how many notifications were rejected; the agent's Counters.Unmatched
// counts the records.
func (b *CompletionBoard) Refused() uint64 { return b.refused.Load() }

// Remote returns where the record of t must be written.
func (b *CompletionBoard) Remote(t CompletionSlot) Remote {
	return b.memory.Remote(int(t.Index)*recordBytes, recordBytes)
}

// Acquire assigns a slot to a request until Release, or until Expire after the given
// time. It returns false if all slots are in use. It takes the slot that has been free for
// longest, so that a late write for the previous request does the least harm.
func (b *CompletionBoard) Acquire(request uint64, until time.Time) (CompletionSlot, bool) {
	i, ok := b.free.pop()
	if !ok {
		return CompletionSlot{}, false
	}
	e := &b.entries[i]
	// The global source is ChaCha8, seeded by the system, per thread and without a
	// lock: a nonce does not reveal the next one.
	t := CompletionSlot{Index: i, Sequence: e.state.Load()>>2 + 1, Nonce: rand.Uint64(), Request: request}
	b.records[i][7].Store(0)
	b.slotCells[i].nonce.Store(t.Nonce)
	b.slotCells[i].request.Store(request)
	b.slotCells[i].sequence.Store(t.Sequence)
	e.request.Store(request)
	e.expires.Store(until.UnixNano())
	e.state.Store(phase(t.Sequence, slotLeased))
	word := uint64(i / 64)
	for n := b.words.Load(); n <= word && !b.words.CompareAndSwap(n, word+1); n = b.words.Load() {
	}
	b.bits[word].Or(1 << (i % 64))
	if b.agent != nil {
		b.agent.driver.expect(1)
	}
	return t, true
}

// Poll returns the state of t, by loads from the slot itself.
func (b *CompletionBoard) Poll(t CompletionSlot) (Completion, State) {
	if int(t.Index) >= len(b.entries) {
		return Completion{}, Released
	}
	e := &b.entries[t.Index]
	switch e.state.Load() {
	case phase(t.Sequence, slotCompleted):
		c := e.result.load()
		if e.state.Load() != phase(t.Sequence, slotCompleted) {
			return Completion{}, Released
		}
		return c, Completed
	case phase(t.Sequence, slotClaimed):
		return Completion{}, Pending
	case phase(t.Sequence, slotLeased):
		var w rawRecord
		w.load(&b.records[t.Index])
		if w.verify(t) != nil {
			return Completion{}, Pending
		}
		if c := w.completion(); b.claim(t, c) {
			return c, Completed
		}
		return Completion{}, Pending
	}
	return Completion{}, Released
}

// CompleteNotified completes a slot by a notification with its number and the nonce that
// went out with the request. The error is ErrForged if the slot is not in use with this nonce
// now, which includes a notification that arrives after Release, and
// ErrLate for a second notification.
func (b *CompletionBoard) CompleteNotified(slot uint32, nonce uint64, c Completion) error {
	err := error(ErrForged)
	if int(slot) < len(b.entries) {
		t, out := b.current(slot)
		if c.Request = t.Request; t.Nonce == nonce && t.Sequence != 0 {
			if out && b.claim(t, c) {
				b.notify(t, c)
				return nil
			}
			err = ErrLate
		}
	}
	b.refused.Add(1)
	return err
}

// current returns the latest CompletionSlot of a slot, and whether it awaits its completion.
func (b *CompletionBoard) current(slot uint32) (CompletionSlot, bool) {
	s := b.entries[slot].state.Load()
	return CompletionSlot{Index: slot, Sequence: s >> 2, Nonce: b.slotCells[slot].nonce.Load(), Request: b.entries[slot].request.Load()}, s&3 == slotLeased
}

// recordWritten is called by the agent's thread with a record that matches its slot's
// cell. It does not read the slot again, because any writer may have overwritten it
// since.
func (b *CompletionBoard) recordWritten(slot int, w rawRecord) {
	if slot < 0 || slot >= len(b.entries) {
		return
	}
	t, out := b.current(uint32(slot))
	if !out || t.Sequence != w[7] {
		return
	}
	if w.verify(t) != nil {
		b.refused.Add(1) // an isolated agent's process is faulty
		return
	}
	if c := w.completion(); b.claim(t, c) {
		b.notify(t, c)
	}
}

// claim makes c the completion of t; one caller wins.
func (b *CompletionBoard) claim(t CompletionSlot, c Completion) bool {
	e := &b.entries[t.Index]
	if !e.state.CompareAndSwap(phase(t.Sequence, slotLeased), phase(t.Sequence, slotClaimed)) {
		return false
	}
	e.result.store(c)
	b.stopWatching(t)
	e.state.Store(phase(t.Sequence, slotCompleted))
	return true
}

func (b *CompletionBoard) notify(t CompletionSlot, c Completion) {
	if b.onCompletion != nil {
		b.onCompletion(t, c)
	}
}

// stopWatching ends the checks of a slot, once for each CompletionSlot.
func (b *CompletionBoard) stopWatching(t CompletionSlot) {
	b.bits[t.Index/64].And(^(uint64(1) << (t.Index % 64)))
	if b.agent != nil {
		b.agent.driver.expect(-1)
	}
}

// Release frees the slot, completed or not. Later calls do nothing.
func (b *CompletionBoard) Release(t CompletionSlot) {
	if int(t.Index) >= len(b.entries) {
		return
	}
	e := &b.entries[t.Index]
	for {
		switch s := e.state.Load(); s {
		case phase(t.Sequence, slotLeased):
			if !e.state.CompareAndSwap(s, phase(t.Sequence, slotClaimed)) {
				continue
			}
			b.stopWatching(t)
		case phase(t.Sequence, slotCompleted):
			if !e.state.CompareAndSwap(s, phase(t.Sequence, slotClaimed)) {
				continue
			}
		case phase(t.Sequence, slotClaimed):
			continue // another goroutine is a few stores away from completing or releasing it
		default:
			return
		}
		e.state.Store(phase(t.Sequence, slotFree))
		b.free.push(t.Index)
		return
	}
}

// Expire releases slots whose time is over. It checks at most limit slots, and the
// next call continues from there. It returns how many were released without a
// completion.
func (b *CompletionBoard) Expire(now time.Time, limit int) int {
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
		if s&3 == slotLeased {
			n++
		}
		b.Release(CompletionSlot{Index: i, Sequence: s >> 2})
	}
	return n
}

// scan checks every lent slot, as the agent's thread does; the fake calls it.
func (b *CompletionBoard) scan() {
	for i := range b.entries {
		if t, out := b.current(uint32(i)); out {
			var w rawRecord
			if w.load(&b.records[i]); w.verify(t) == nil {
				b.recordWritten(i, w)
			}
		}
	}
}
