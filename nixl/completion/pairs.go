package completion

import (
	"math"
	"sync/atomic"
	"time"
)

// Pairs keeps what transfers from one rank to another took, by the ranks' numbers
// (0 … MaxRanks-1). From and Row.NSPerToken are read on the request path; Note is
// called once a transfer. The zero Pairs is empty and ready.
//
// Its figures are moving averages in atomics of their own: a sample lost to a race
// is no loss, and a reader that sees one figure's new and another's old value is
// not misled by more than that sample.
type Pairs struct {
	rows [MaxRanks]atomic.Pointer[Row]
}

// MaxRanks bounds the numbers of ranks.
const MaxRanks = 4096

// Row is what transfers from one rank to all others took, 96 KiB; it is made at
// the first.
type Row struct {
	common atomic.Uint64 // ns per token over all of them, float64 bits
	cells  [MaxRanks]cell
}

type cell struct {
	nsPerToken     atomic.Uint64 // float64 bits, as the next
	bytesPerSecond atomic.Uint64
	transfers      atomic.Int64
}

const (
	// weight of a new sample in the moving average.
	weight = 0.2
	// minBytes: what is smaller tells of latency, not of bandwidth.
	minBytes = 64 << 10
)

// Note books a transfer of so many bytes and prompt tokens; numbers out of range
// and transfers without a time are passed over.
func (p *Pairs) Note(from, to int, bytes int64, tokens int, took time.Duration) {
	if took <= 0 || uint(from) >= MaxRanks || uint(to) >= MaxRanks {
		return
	}
	row := p.rows[from].Load()
	if row == nil {
		if row = new(Row); !p.rows[from].CompareAndSwap(nil, row) {
			row = p.rows[from].Load()
			if row == nil {
				return // forgotten this moment
			}
		}
	}
	c := &row.cells[to]
	c.transfers.Add(1)
	if bytes >= minBytes {
		blend(&c.bytesPerSecond, float64(bytes)/took.Seconds())
	}
	if tokens > 0 {
		perToken := float64(took) / float64(tokens)
		blend(&c.nsPerToken, perToken)
		blend(&row.common, perToken)
	}
}

// blend moves an average towards x.
func blend(to *atomic.Uint64, x float64) {
	old := to.Load()
	if old != 0 {
		was := math.Float64frombits(old)
		x = was + weight*(x-was)
	}
	to.CompareAndSwap(old, math.Float64bits(x))
}

// From is what is known of transfers from a rank; nil: nothing.
func (p *Pairs) From(from int) *Row {
	if p == nil || uint(from) >= MaxRanks {
		return nil
	}
	return p.rows[from].Load()
}

// NSPerToken is the measured time to move one prompt token's KV to a rank. For one
// that nothing was moved to yet it is the average over the others, so that a choice
// between measured and unmeasured ranks compares like with like. 0: nothing is known.
func (r *Row) NSPerToken(to int) float64 {
	if r == nil || uint(to) >= MaxRanks {
		return 0
	}
	if v := r.cells[to].nsPerToken.Load(); v != 0 {
		return math.Float64frombits(v)
	}
	return math.Float64frombits(r.common.Load())
}

// Seen is what is known of one pair.
type Seen struct {
	From, To       int
	Transfers      int64
	BytesPerSecond float64 // 0 unknown
	NSPerToken     float64 // 0 unknown
}

// All lists what is known, by from and to.
func (p *Pairs) All() []Seen {
	var out []Seen
	for from := range p.rows {
		row := p.rows[from].Load()
		if row == nil {
			continue
		}
		for to := range row.cells {
			if c := &row.cells[to]; c.transfers.Load() > 0 {
				out = append(out, Seen{From: from, To: to, Transfers: c.transfers.Load(),
					BytesPerSecond: math.Float64frombits(c.bytesPerSecond.Load()), NSPerToken: math.Float64frombits(c.nsPerToken.Load())})
			}
		}
	}
	return out
}

// Forget drops what is known of a rank that has left: its number may be given to
// another.
func (p *Pairs) Forget(rank int) {
	if uint(rank) >= MaxRanks {
		return
	}
	p.rows[rank].Store(nil)
	for from := range p.rows {
		if row := p.rows[from].Load(); row != nil {
			c := &row.cells[rank]
			c.transfers.Store(0)
			c.bytesPerSecond.Store(0)
			c.nsPerToken.Store(0)
		}
	}
}
