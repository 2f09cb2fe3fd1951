package record

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Kind tells entries apart.
type Kind byte

// The kinds of entries.
const (
	Settings Kind = iota + 1 // of the scheduler
	Joined                   // a rank, known from here on by its slot
	Left                     // a rank is gone, its blocks with it
	Stored                   // the index stored blocks
	Removed                  // the index removed blocks
	Cleared                  // a rank lost all its blocks
	Pool                     // the candidates of choices, known from here on by a number
	Chosen                   // a choice, or that none could be made
	Ended                    // a request's outcome
	Dropped                  // entries that did not fit the queue
	Held                     // a rank held blocks before the entries that follow
	LeftOut                  // blocks held that were too many to be written
	Began                    // which recording this is part of, and when that began
)

// Entry is one line of a recording; which fields are set goes by Kind. Slices
// are borrowed until the next one is read.
type Entry struct {
	Kind Kind
	At   time.Time
	Slot worker.Slot // of Joined, Left, Stored, Removed, Cleared, Chosen, Held

	// Settings
	Policy  string
	Weights map[string]float64 // by their names in the configuration

	// Joined
	Rank                           worker.ID
	Role                           worker.Role
	Model                          string
	BlockSize, TotalBlocks, Ranked int // Ranked: ranks of the worker

	// Stored, Removed, Held
	Tier      kvindex.Tier
	Salt      blockhash.Salt
	HasParent bool
	Parent    kvindex.EngineHash
	Engine    []kvindex.EngineHash
	Local     []blockhash.Local // of Stored
	ParentSeq blockhash.Seq     // of Held

	// Pool, Chosen
	Pool  uint64
	Slots []worker.Slot // of Pool

	// Chosen; BlockSize is of Seqs, in tokens. Held has Exact and Seqs too, as long
	// as Engine, and its chain follows ParentSeq where HasParent is set.
	Request                         uint64 // hash of the request's id, also of Ended
	Leg                             schedule.Leg
	Attempt, Prompt, Output         int
	Found                           bool // Slot was chosen
	Predicted, Overlap              int  // tokens, blocks
	Exact                           bool // Seqs are of the index's grain and salt, not of the approximate one's
	Seqs                            []blockhash.Seq
	Cost                            float64
	Status, Cached, PromptT, OutToT int // Ended; Cached -1: the engine did not say
	TTFT, Total                     time.Duration
	Count                           uint64 // Dropped, LeftOut
	Recording                       uint64 // Began: a number drawn when it began, the same in all of its files
}

func words[T ~uint64](dst []byte, v []T) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(v)))
	for _, x := range v {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(x))
	}
	return dst
}

func text(dst []byte, s string) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(s))), s...)
}

func number(dst []byte, v int) []byte { return binary.AppendVarint(dst, int64(v)) }

func flag(dst []byte, b bool) []byte {
	if b {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// begin appends what every entry starts with.
func begin(dst []byte, k Kind, at time.Time) []byte {
	return binary.AppendVarint(append(dst, byte(k)), at.UnixMicro())
}

// Append appends e as it stands in a frame.
func (e *Entry) Append(b []byte) []byte {
	b = begin(b, e.Kind, e.At)
	switch e.Kind {
	case Settings:
		b = text(b, e.Policy)
		b = binary.AppendUvarint(b, uint64(len(e.Weights)))
		for _, name := range slices.Sorted(maps.Keys(e.Weights)) {
			b = binary.LittleEndian.AppendUint64(text(b, name), math.Float64bits(e.Weights[name]))
		}
	case Joined:
		b = number(b, int(e.Slot))
		b = text(b, e.Rank.Worker)
		b = number(b, int(e.Rank.Rank))
		b = append(b, byte(e.Role))
		b = text(b, e.Model)
		b = number(number(number(b, e.BlockSize), e.TotalBlocks), e.Ranked)
	case Left, Cleared:
		b = number(b, int(e.Slot))
	case Stored:
		b = appendStored(b, e.Slot, e.Tier, e.Salt, e.HasParent, e.Parent, e.Engine, e.Local)
	case Removed:
		b = words(append(number(b, int(e.Slot)), byte(e.Tier)), e.Engine)
	case Pool:
		b = binary.AppendUvarint(b, e.Pool)
		b = binary.AppendUvarint(b, uint64(len(e.Slots)))
		for _, s := range e.Slots {
			b = binary.AppendUvarint(b, uint64(s))
		}
	case Chosen:
		b = binary.AppendUvarint(b, e.Pool)
		b = appendChosen(b, e)
	case Ended:
		b = binary.LittleEndian.AppendUint64(b, e.Request)
		b = number(number(number(number(b, e.Status), e.Cached), e.PromptT), e.OutToT)
		b = number(number(b, int(e.TTFT/time.Microsecond)), int(e.Total/time.Microsecond))
	case Dropped, LeftOut:
		b = binary.AppendUvarint(b, e.Count)
	case Began:
		b = binary.LittleEndian.AppendUint64(b, e.Recording)
	case Held:
		b = flag(append(number(b, int(e.Slot)), byte(e.Tier)), e.Exact)
		b = flag(b, e.HasParent)
		b = binary.LittleEndian.AppendUint64(b, uint64(e.Parent))
		b = binary.LittleEndian.AppendUint64(b, uint64(e.ParentSeq))
		b = words(words(b, e.Engine), e.Seqs)
	}
	return b
}

func appendStored(b []byte, slot worker.Slot, tier kvindex.Tier, salt blockhash.Salt, hasParent bool, parent kvindex.EngineHash,
	engine []kvindex.EngineHash, local []blockhash.Local) []byte {
	b = append(number(b, int(slot)), byte(tier))
	b = binary.LittleEndian.AppendUint64(b, uint64(salt))
	b = flag(b, hasParent)
	b = binary.LittleEndian.AppendUint64(b, uint64(parent))
	return words(words(b, engine), local)
}

// appendChosen appends what follows the pool's number.
func appendChosen(b []byte, e *Entry) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.Request)
	b = append(b, byte(e.Leg))
	b = number(number(number(b, e.Attempt), e.Prompt), e.Output)
	b = number(flag(b, e.Found), int(e.Slot))
	b = number(number(b, e.Predicted), e.Overlap)
	b = binary.LittleEndian.AppendUint64(b, math.Float64bits(e.Cost))
	b = number(flag(b, e.Exact), e.BlockSize)
	return words(b, e.Seqs)
}

// cursor reads what Append wrote. After a mistake it gives zeros and keeps err.
type cursor struct {
	b   []byte
	err error
}

func (c *cursor) fail(what string) {
	if c.err == nil {
		c.err = fmt.Errorf("%w: an entry ends within its %s", ErrCorrupted, what)
	}
	c.b = nil
}

func (c *cursor) byte() byte {
	if len(c.b) == 0 {
		c.fail("byte")
		return 0
	}
	v := c.b[0]
	c.b = c.b[1:]
	return v
}

func (c *cursor) u64() uint64 {
	if len(c.b) < 8 {
		c.fail("word")
		return 0
	}
	v := binary.LittleEndian.Uint64(c.b)
	c.b = c.b[8:]
	return v
}

func (c *cursor) uvarint() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.fail("number")
		return 0
	}
	c.b = c.b[n:]
	return v
}

func (c *cursor) number() int {
	v, n := binary.Varint(c.b)
	if n <= 0 {
		c.fail("number")
		return 0
	}
	c.b = c.b[n:]
	return int(v)
}

// length reads a count of things that take least bytes each.
func (c *cursor) length(least int) int {
	n := c.uvarint()
	if n > uint64(len(c.b)/least) {
		c.fail("list")
		return 0
	}
	return int(n)
}

func (c *cursor) text() string {
	n := c.length(1)
	s := string(c.b[:n])
	c.b = c.b[n:]
	return s
}

func (c *cursor) slot() worker.Slot {
	v := c.number()
	if v < 0 || v >= worker.MaxSlots {
		c.fail("slot")
		return 0
	}
	return worker.Slot(v)
}

func readWords[T ~uint64](c *cursor, dst []T) []T {
	dst = dst[:0]
	for range c.length(8) {
		dst = append(dst, T(c.u64()))
	}
	return dst
}

// read reads the next entry into e, whose slices it reuses.
func (c *cursor) read(e *Entry) error {
	*e = Entry{Engine: e.Engine[:0], Local: e.Local[:0], Slots: e.Slots[:0], Seqs: e.Seqs[:0]}
	e.Kind = Kind(c.byte())
	e.At = time.UnixMicro(int64(c.number()))
	switch e.Kind {
	case Settings:
		e.Policy = c.text()
		e.Weights = make(map[string]float64)
		for range c.length(9) {
			name := c.text()
			e.Weights[name] = math.Float64frombits(c.u64())
		}
	case Joined:
		e.Slot = c.slot()
		e.Rank = worker.ID{Worker: c.text(), Rank: uint16(c.number())}
		e.Role = worker.Role(c.byte())
		e.Model = c.text()
		e.BlockSize, e.TotalBlocks, e.Ranked = c.number(), c.number(), c.number()
	case Left, Cleared:
		e.Slot = c.slot()
	case Stored:
		e.Slot, e.Tier, e.Salt = c.slot(), kvindex.Tier(c.byte()), blockhash.Salt(c.u64())
		e.HasParent, e.Parent = c.byte() != 0, kvindex.EngineHash(c.u64())
		e.Engine = readWords(c, e.Engine)
		e.Local = readWords(c, e.Local)
	case Removed:
		e.Slot, e.Tier = c.slot(), kvindex.Tier(c.byte())
		e.Engine = readWords(c, e.Engine)
	case Pool:
		e.Pool = c.uvarint()
		for range c.length(1) {
			e.Slots = append(e.Slots, worker.Slot(c.uvarint()%worker.MaxSlots))
		}
	case Chosen:
		e.Pool, e.Request, e.Leg = c.uvarint(), c.u64(), schedule.Leg(c.byte())
		e.Attempt, e.Prompt, e.Output = c.number(), c.number(), c.number()
		e.Found, e.Slot = c.byte() != 0, c.slot()
		e.Predicted, e.Overlap, e.Cost = c.number(), c.number(), math.Float64frombits(c.u64())
		e.Exact, e.BlockSize = c.byte() != 0, c.number()
		e.Seqs = readWords(c, e.Seqs)
	case Ended:
		e.Request = c.u64()
		e.Status, e.Cached, e.PromptT, e.OutToT = c.number(), c.number(), c.number(), c.number()
		e.TTFT, e.Total = time.Duration(c.number())*time.Microsecond, time.Duration(c.number())*time.Microsecond
	case Dropped, LeftOut:
		e.Count = c.uvarint()
	case Began:
		e.Recording = c.u64()
	case Held:
		e.Slot, e.Tier, e.Exact = c.slot(), kvindex.Tier(c.byte()), c.byte() != 0
		e.HasParent, e.Parent, e.ParentSeq = c.byte() != 0, kvindex.EngineHash(c.u64()), blockhash.Seq(c.u64())
		e.Engine = readWords(c, e.Engine)
		e.Seqs = readWords(c, e.Seqs)
		if len(e.Engine) != len(e.Seqs) {
			c.fail("chain")
		}
	default:
		if c.err == nil {
			c.err = fmt.Errorf("%w: an entry of unknown kind %d", ErrCorrupted, e.Kind)
		}
	}
	return c.err
}
