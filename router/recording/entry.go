package recording

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

// Kind is the type of an entry.
type Kind byte

// The types of entries.
const (
	Settings       Kind = iota + 1 // the scheduler's policy and weights
	RankAdded                      // defines a rank, which later entries identify by its slot
	RankRemoved                    // a rank was removed together with its blocks
	Stored                         // the index stored blocks
	Removed                        // the index removed blocks
	Cleared                        // a rank lost all its blocks
	Pool                           // defines a number for the candidates of choices
	Chosen                         // a choice, or that no rank could be chosen
	Ended                          // a request's outcome
	DroppedEntries                 // number of entries that did not fit into the queue
	InitialBlocks                  // blocks that a rank held before the entries that follow
	InitialSkipped                 // number of initial blocks not written because of MaxInitialBlocks
	RecordingInfo                  // the recording to which the file belongs, and its beginning
)

// Entry is one entry of a recording. Kind decides which fields are set. The slices are valid
// until the next entry is read.
type Entry struct {
	Kind Kind
	At   time.Time
	Slot worker.Slot // of RankAdded, RankRemoved, Stored, Removed, Cleared, Chosen, InitialBlocks

	// Settings
	Policy  string
	Weights map[string]float64 // by their names in the configuration

	// RankAdded
	Rank                                worker.ID
	Role                                worker.Role
	Model                               string
	BlockSize, TotalBlocks, WorkerRanks int // WorkerRanks: number of ranks of the worker

	// Stored, Removed, InitialBlocks
	Tier      kvindex.Tier
	Salt      blockhash.Salt
	HasParent bool
	Parent    kvindex.EngineHash
	Engine    []kvindex.EngineHash
	Local     []blockhash.Local // of Stored
	ParentSeq blockhash.Seq     // of InitialBlocks

	// Pool, Chosen
	Pool  uint64
	Slots []worker.Slot // of Pool

	// Chosen; BlockSize is the size of the blocks of Seqs, in tokens. InitialBlocks also has
	// Exact and Seqs, the latter as long as Engine, and its chain follows ParentSeq if
	// HasParent is set.
	Request                                    uint64 // hash of the request's id; also of Ended
	Leg                                        schedule.LegKind
	Attempt, Prompt, Output                    int
	Found                                      bool // a rank was chosen, and Slot is its slot
	Predicted, Overlap                         int  // in tokens and in blocks
	Exact                                      bool // Seqs have the event-driven index's block size and salt, not the approximate index's
	Seqs                                       []blockhash.Seq
	Cost                                       float64
	Status, Cached, PromptTokens, OutputTokens int // Ended; Cached is -1 if the engine did not report it
	TTFT, Total                                time.Duration
	Count                                      uint64 // DroppedEntries, InitialSkipped
	Recording                                  uint64 // RecordingInfo: a random number, the same in all files of the recording
}

func appendUint64s[T ~uint64](dst []byte, v []T) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(v)))
	for _, x := range v {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(x))
	}
	return dst
}

func appendText(dst []byte, s string) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(s))), s...)
}

func appendNumber(dst []byte, v int) []byte { return binary.AppendVarint(dst, int64(v)) }

func appendBool(dst []byte, b bool) []byte {
	if b {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// begin appends the beginning of every entry.
func begin(dst []byte, k Kind, at time.Time) []byte {
	return binary.AppendVarint(append(dst, byte(k)), at.UnixMicro())
}

// Append appends e in the encoding of a frame.
func (e *Entry) Append(b []byte) []byte {
	b = begin(b, e.Kind, e.At)
	switch e.Kind {
	case Settings:
		b = appendText(b, e.Policy)
		b = binary.AppendUvarint(b, uint64(len(e.Weights)))
		for _, name := range slices.Sorted(maps.Keys(e.Weights)) {
			b = binary.LittleEndian.AppendUint64(appendText(b, name), math.Float64bits(e.Weights[name]))
		}
	case RankAdded:
		b = appendNumber(b, int(e.Slot))
		b = appendText(b, e.Rank.Worker)
		b = appendNumber(b, int(e.Rank.Rank))
		b = append(b, byte(e.Role))
		b = appendText(b, e.Model)
		b = appendNumber(appendNumber(appendNumber(b, e.BlockSize), e.TotalBlocks), e.WorkerRanks)
	case RankRemoved, Cleared:
		b = appendNumber(b, int(e.Slot))
	case Stored:
		b = appendStored(b, e.Slot, e.Tier, e.Salt, e.HasParent, e.Parent, e.Engine, e.Local)
	case Removed:
		b = appendUint64s(append(appendNumber(b, int(e.Slot)), byte(e.Tier)), e.Engine)
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
		b = appendNumber(appendNumber(appendNumber(appendNumber(b, e.Status), e.Cached), e.PromptTokens), e.OutputTokens)
		b = appendNumber(appendNumber(b, int(e.TTFT/time.Microsecond)), int(e.Total/time.Microsecond))
	case DroppedEntries, InitialSkipped:
		b = binary.AppendUvarint(b, e.Count)
	case RecordingInfo:
		b = binary.LittleEndian.AppendUint64(b, e.Recording)
	case InitialBlocks:
		b = appendBool(append(appendNumber(b, int(e.Slot)), byte(e.Tier)), e.Exact)
		b = appendBool(b, e.HasParent)
		b = binary.LittleEndian.AppendUint64(b, uint64(e.Parent))
		b = binary.LittleEndian.AppendUint64(b, uint64(e.ParentSeq))
		b = appendUint64s(appendUint64s(b, e.Engine), e.Seqs)
	}
	return b
}

func appendStored(b []byte, slot worker.Slot, tier kvindex.Tier, salt blockhash.Salt, hasParent bool, parent kvindex.EngineHash,
	engine []kvindex.EngineHash, local []blockhash.Local) []byte {
	b = append(appendNumber(b, int(slot)), byte(tier))
	b = binary.LittleEndian.AppendUint64(b, uint64(salt))
	b = appendBool(b, hasParent)
	b = binary.LittleEndian.AppendUint64(b, uint64(parent))
	return appendUint64s(appendUint64s(b, engine), local)
}

// appendChosen appends the part of a choice that follows the pool's number.
func appendChosen(b []byte, e *Entry) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.Request)
	b = append(b, byte(e.Leg))
	b = appendNumber(appendNumber(appendNumber(b, e.Attempt), e.Prompt), e.Output)
	b = appendNumber(appendBool(b, e.Found), int(e.Slot))
	b = appendNumber(appendNumber(b, e.Predicted), e.Overlap)
	b = binary.LittleEndian.AppendUint64(b, math.Float64bits(e.Cost))
	b = appendNumber(appendBool(b, e.Exact), e.BlockSize)
	return appendUint64s(b, e.Seqs)
}

// entryReader reads the encoding that Append writes. After an error it returns zeros and keeps
// err.
type entryReader struct {
	b   []byte
	err error
}

func (c *entryReader) fail(what string) {
	if c.err == nil {
		c.err = fmt.Errorf("%w: an entry ends within its %s", ErrCorrupted, what)
	}
	c.b = nil
}

func (c *entryReader) byte() byte {
	if len(c.b) == 0 {
		c.fail("byte")
		return 0
	}
	v := c.b[0]
	c.b = c.b[1:]
	return v
}

func (c *entryReader) u64() uint64 {
	if len(c.b) < 8 {
		c.fail("word")
		return 0
	}
	v := binary.LittleEndian.Uint64(c.b)
	c.b = c.b[8:]
	return v
}

func (c *entryReader) uvarint() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.fail("number")
		return 0
	}
	c.b = c.b[n:]
	return v
}

func (c *entryReader) number() int {
	v, n := binary.Varint(c.b)
	if n <= 0 {
		c.fail("number")
		return 0
	}
	c.b = c.b[n:]
	return int(v)
}

// length reads the number of elements that take at least least bytes each.
func (c *entryReader) length(least int) int {
	n := c.uvarint()
	if n > uint64(len(c.b)/least) {
		c.fail("list")
		return 0
	}
	return int(n)
}

func (c *entryReader) text() string {
	n := c.length(1)
	s := string(c.b[:n])
	c.b = c.b[n:]
	return s
}

func (c *entryReader) slot() worker.Slot {
	v := c.number()
	if v < 0 || v >= worker.MaxSlots {
		c.fail("slot")
		return 0
	}
	return worker.Slot(v)
}

func readUint64s[T ~uint64](c *entryReader, dst []T) []T {
	dst = dst[:0]
	for range c.length(8) {
		dst = append(dst, T(c.u64()))
	}
	return dst
}

// read reads the next entry into e, whose slices it reuses.
func (c *entryReader) read(e *Entry) error {
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
	case RankAdded:
		e.Slot = c.slot()
		e.Rank = worker.ID{Worker: c.text(), Rank: uint16(c.number())}
		e.Role = worker.Role(c.byte())
		e.Model = c.text()
		e.BlockSize, e.TotalBlocks, e.WorkerRanks = c.number(), c.number(), c.number()
	case RankRemoved, Cleared:
		e.Slot = c.slot()
	case Stored:
		e.Slot, e.Tier, e.Salt = c.slot(), kvindex.Tier(c.byte()), blockhash.Salt(c.u64())
		e.HasParent, e.Parent = c.byte() != 0, kvindex.EngineHash(c.u64())
		e.Engine = readUint64s(c, e.Engine)
		e.Local = readUint64s(c, e.Local)
	case Removed:
		e.Slot, e.Tier = c.slot(), kvindex.Tier(c.byte())
		e.Engine = readUint64s(c, e.Engine)
	case Pool:
		e.Pool = c.uvarint()
		for range c.length(1) {
			e.Slots = append(e.Slots, worker.Slot(c.uvarint()%worker.MaxSlots))
		}
	case Chosen:
		e.Pool, e.Request, e.Leg = c.uvarint(), c.u64(), schedule.LegKind(c.byte())
		e.Attempt, e.Prompt, e.Output = c.number(), c.number(), c.number()
		e.Found, e.Slot = c.byte() != 0, c.slot()
		e.Predicted, e.Overlap, e.Cost = c.number(), c.number(), math.Float64frombits(c.u64())
		e.Exact, e.BlockSize = c.byte() != 0, c.number()
		e.Seqs = readUint64s(c, e.Seqs)
	case Ended:
		e.Request = c.u64()
		e.Status, e.Cached, e.PromptTokens, e.OutputTokens = c.number(), c.number(), c.number(), c.number()
		e.TTFT, e.Total = time.Duration(c.number())*time.Microsecond, time.Duration(c.number())*time.Microsecond
	case DroppedEntries, InitialSkipped:
		e.Count = c.uvarint()
	case RecordingInfo:
		e.Recording = c.u64()
	case InitialBlocks:
		e.Slot, e.Tier, e.Exact = c.slot(), kvindex.Tier(c.byte()), c.byte() != 0
		e.HasParent, e.Parent, e.ParentSeq = c.byte() != 0, kvindex.EngineHash(c.u64()), blockhash.Seq(c.u64())
		e.Engine = readUint64s(c, e.Engine)
		e.Seqs = readUint64s(c, e.Seqs)
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
