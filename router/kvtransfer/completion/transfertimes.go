package completion

import (
	"math"
	"sync/atomic"
	"time"
)

// TransferTimes keeps what transfers from one rank to another took, by the ranks' numbers
// (0 … MaxRanks-1). From and Row.NSPerToken are read on the request path; Note is
// called once a transfer. The zero Pairs is empty and ready.
//
// What a pair costs is judged so that a transfer which stood for seconds (a
// hand-shake, a busy engine) does not take the pair out of use, for then nothing
// would ever be moved there again to show otherwise: of the first few the least
// counts, later ones count for a few times the average at most, a pair of few
// transfers is taken as the others of its prefill rank, a rank of few as all, and
// Fade lets go of what is old.
//
// Its figures are moving averages in atomics of their own: a sample lost to a race
// is no loss, and a reader that sees one figure's new and another's old value is
// not misled by more than that sample.
type TransferTimes struct {
	rows     [MaxRanks]atomic.Pointer[Row]
	all      mean
	emptyRow atomic.Pointer[Row] // stands for the rows that are not there
}

// MaxRanks bounds the numbers of ranks.
const MaxRanks = 4096

// Row is what transfers from one rank to all others took, 160 KiB; it is made at
// the first.
type Row struct {
	all    *mean // over all rows
	common mean  // over this one
	most   atomic.Int64
	cells  [MaxRanks]cell
}

type cell struct {
	nsPerToken     mean
	bytesPerSecond atomic.Uint64 // float64 bits
	transfers      atomic.Int64
	last           atomic.Int64 // when, in ns since 1970
}

// mean is a moving average of what is never below 0, 0 when nothing is known.
type mean struct {
	value atomic.Uint64 // float64 bits
	n     atomic.Int64
}

const (
	// sampleWeight of a new sample in the moving average.
	sampleWeight = 0.2
	// minSamples samples say what the least is, not yet what is usual.
	minSamples = 4
	// outlier: so many times the average a sample counts at most.
	outlierFactor = 4
	// minBytes: what is smaller tells of latency, not of bandwidth.
	minBytes = 64 << 10
)

// Observe books a transfer of so many bytes and prompt tokens; numbers out of range
// and transfers without a time are passed over.
func (p *TransferTimes) Observe(from, to int, bytes int64, tokens int, took time.Duration) {
	if took <= 0 || uint(from) >= MaxRanks || uint(to) >= MaxRanks {
		return
	}
	row := p.row(&p.rows[from])
	c := &row.cells[to]
	c.transfers.Add(1)
	c.last.Store(time.Now().UnixNano())
	if bytes >= minBytes {
		blend(&c.bytesPerSecond, float64(bytes)/took.Seconds())
	}
	if tokens > 0 {
		p.row(&p.emptyRow)
		perToken := float64(took) / float64(tokens)
		c.nsPerToken.add(perToken)
		row.common.add(perToken)
		p.all.add(perToken)
		for most := row.most.Load(); most <= int64(to) && !row.most.CompareAndSwap(most, int64(to)+1); most = row.most.Load() {
		}
	}
}

func (p *TransferTimes) row(at *atomic.Pointer[Row]) *Row {
	row := at.Load()
	if row == nil {
		row = &Row{all: &p.all}
		if !at.CompareAndSwap(nil, row) {
			if first := at.Load(); first != nil {
				row = first // else forgotten this moment, and what is noted with it
			}
		}
	}
	return row
}

func (m *mean) add(x float64) {
	n := m.n.Add(1)
	old := m.value.Load()
	was := math.Float64frombits(old)
	switch {
	case n == 1 || old == 0:
	case n <= minSamples:
		x = min(x, was)
	default:
		x = was + sampleWeight*(min(x, outlierFactor*was)-was)
	}
	m.value.CompareAndSwap(old, math.Float64bits(x))
}

func (m *mean) load() float64 { return math.Float64frombits(m.value.Load()) }

func (m *mean) clear() {
	m.n.Store(0)
	m.value.Store(0)
}

// blend moves an average towards x.
func blend(to *atomic.Uint64, x float64) {
	old := to.Load()
	if old != 0 {
		was := math.Float64frombits(old)
		x = was + sampleWeight*(x-was)
	}
	to.CompareAndSwap(old, math.Float64bits(x))
}

// From is what is known of transfers from a rank: of one that nothing was moved
// from yet what is known of all; nil: nothing.
func (p *TransferTimes) From(from int) *Row {
	if p == nil || uint(from) >= MaxRanks {
		return nil
	}
	if row := p.rows[from].Load(); row != nil {
		return row
	}
	return p.emptyRow.Load()
}

// NSPerToken is the measured time to move one prompt token's KV to a rank. For one
// that little was moved to lately it is the average over the others, so that a
// choice between measured and unmeasured ranks compares like with like. 0: nothing
// is known.
func (r *Row) NSPerToken(to int) float64 {
	if r == nil || uint(to) >= MaxRanks {
		return 0
	}
	if c := &r.cells[to].nsPerToken; c.n.Load() >= minSamples {
		return c.load()
	}
	if r.common.n.Load() >= minSamples {
		return r.common.load()
	}
	return r.all.load()
}

// Expire lets go of the times per token of pairs between which nothing was moved
// since then: what was slow may be fast again, and only a transfer can tell.
func (p *TransferTimes) Expire(since time.Time) {
	for from := range p.rows {
		row := p.rows[from].Load()
		if row == nil {
			continue
		}
		live := false
		for to := range row.cells[:row.most.Load()] {
			c := &row.cells[to]
			if c.nsPerToken.n.Load() == 0 {
				continue
			}
			if c.last.Load() < since.UnixNano() {
				c.nsPerToken.clear()
			} else {
				live = true
			}
		}
		if !live {
			row.common.clear()
		}
	}
}

// PairTimes is what is known of one pair.
type PairTimes struct {
	From, To       int
	Transfers      int64
	BytesPerSecond float64 // 0 unknown
	NSPerToken     float64 // 0 unknown, or too long ago
}

// List lists what is known, by from and to.
func (p *TransferTimes) List() []PairTimes {
	var out []PairTimes
	for from := range p.rows {
		row := p.rows[from].Load()
		if row == nil {
			continue
		}
		for to := range row.cells {
			if c := &row.cells[to]; c.transfers.Load() > 0 {
				out = append(out, PairTimes{From: from, To: to, Transfers: c.transfers.Load(),
					BytesPerSecond: math.Float64frombits(c.bytesPerSecond.Load()), NSPerToken: c.nsPerToken.load()})
			}
		}
	}
	return out
}

// Remove drops what is known of a rank that has left: its number may be given to
// another.
func (p *TransferTimes) Remove(rank int) {
	if uint(rank) >= MaxRanks {
		return
	}
	p.rows[rank].Store(nil)
	for from := range p.rows {
		if row := p.rows[from].Load(); row != nil {
			c := &row.cells[rank]
			c.transfers.Store(0)
			c.bytesPerSecond.Store(0)
			c.nsPerToken.clear()
		}
	}
}
