package completion

import (
	"math"
	"sync/atomic"
	"time"
)

// TransferTimes keeps measured times of transfers between ranks, identified by slots 0 to
// MaxRanks-1. From and Row.NSPerToken are called on the request path, Observe once per
// transfer. The zero TransferTimes is empty and ready.
//
// One slow transfer (a handshake, a busy engine) must not exclude a pair of ranks: no further
// transfer would then show that the pair is fast. Therefore the minimum of the first few
// samples counts, and a later sample counts at most outlierFactor times the average. A pair
// with few samples uses the average of its prefill rank, and a rank with few samples the
// average of all. Expire removes old values.
//
// All values are moving averages in separate atomics. A sample lost in a race does no harm, and
// a reader that sees one new and one old value is off by at most that sample.
type TransferTimes struct {
	rows     [MaxRanks]atomic.Pointer[Row]
	all      mean
	emptyRow atomic.Pointer[Row] // used for ranks that have no row
}

// MaxRanks is the number of slots.
const MaxRanks = 4096

// Row holds the times of transfers from one rank to all others, 160 KiB. It is allocated at the
// first transfer.
type Row struct {
	all    *mean // over all rows
	common mean  // over this row
	most   atomic.Int64
	cells  [MaxRanks]cell
}

type cell struct {
	nsPerToken     mean
	bytesPerSecond atomic.Uint64 // float64 bits
	transfers      atomic.Int64
	last           atomic.Int64 // time of the last transfer, Unix nanoseconds
}

// mean is a moving average of non-negative values; 0 means unknown.
type mean struct {
	value atomic.Uint64 // float64 bits
	n     atomic.Int64
}

const (
	// sampleWeight is the weight of a new sample in the moving average.
	sampleWeight = 0.2
	// minSamples is the number of samples of which the minimum is used instead of the average.
	minSamples = 4
	// outlierFactor limits a sample to this multiple of the average.
	outlierFactor = 4
	// minBytes is the size below which a transfer measures latency, not bandwidth.
	minBytes = 64 << 10
)

// Observe records a transfer of this many bytes and prompt tokens. It ignores slots out of
// range and transfers without a duration.
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
				row = first // else Remove has just deleted the row, and this sample is lost with it
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

// blend moves an average toward x.
func blend(to *atomic.Uint64, x float64) {
	old := to.Load()
	if old != 0 {
		was := math.Float64frombits(old)
		x = was + sampleWeight*(x-was)
	}
	to.CompareAndSwap(old, math.Float64bits(x))
}

// From returns the times of transfers from a rank. For a rank without transfers it returns a
// row that has only the average of all ranks; nil when nothing is known.
func (p *TransferTimes) From(from int) *Row {
	if p == nil || uint(from) >= MaxRanks {
		return nil
	}
	if row := p.rows[from].Load(); row != nil {
		return row
	}
	return p.emptyRow.Load()
}

// NSPerToken returns the measured nanoseconds per prompt token of transfers to a rank. For a
// pair with few recent transfers it returns the average over the others, so that measured and
// unmeasured ranks are comparable. 0 means unknown.
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

// Expire removes the time per token of pairs without a transfer since then. A slow pair may be
// fast again, and only a transfer can show it.
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

// PairTimes is the measured performance of one pair of ranks.
type PairTimes struct {
	From, To       int
	Transfers      int64
	BytesPerSecond float64 // 0: unknown
	NSPerToken     float64 // 0: unknown or expired
}

// List returns every pair with transfers, ordered by From and To.
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

// Remove deletes the measurements of a rank that was removed, because another rank may get its
// slot.
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
