package completion

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Pairs keeps what transfers from one worker to another took. Rate is read on the
// request path; Note is called once a transfer.
type Pairs struct {
	mu    sync.Mutex
	rates sync.Map // pair -> *rate
	count int
}

type pair struct{ from, to string }

type rate struct {
	bytesPerSecond atomic.Uint64 // float64 bits
	tokensPerMS    atomic.Uint64
	transfers      atomic.Int64
}

const (
	// maxPairs bounds the table: 64 prefill by 1,024 decode workers.
	maxPairs = 65536
	// weight of a new sample in the moving average.
	weight = 0.2
	// minBytes: what is smaller tells of latency, not of bandwidth.
	minBytes = 64 << 10
)

// Note books a transfer of so many bytes and prompt tokens.
func (p *Pairs) Note(from, to string, bytes int64, tokens int, took time.Duration) {
	if took <= 0 {
		return
	}
	k := pair{from, to}
	v, ok := p.rates.Load(k)
	if !ok {
		p.mu.Lock()
		if p.count >= maxPairs {
			p.mu.Unlock()
			return
		}
		if v, ok = p.rates.LoadOrStore(k, new(rate)); !ok {
			p.count++
		}
		p.mu.Unlock()
	}
	r := v.(*rate)
	r.transfers.Add(1)
	if bytes >= minBytes {
		blend(&r.bytesPerSecond, float64(bytes)/took.Seconds())
	}
	if tokens > 0 {
		blend(&r.tokensPerMS, float64(tokens)/(float64(took)/float64(time.Millisecond)))
	}
}

// blend moves an average towards x; a sample lost to a race is no loss.
func blend(to *atomic.Uint64, x float64) {
	old := to.Load()
	if old != 0 {
		was := math.Float64frombits(old)
		x = was + weight*(x-was)
	}
	to.CompareAndSwap(old, math.Float64bits(x))
}

// Seen is what is known of one pair.
type Seen struct {
	From, To       string
	Transfers      int64
	BytesPerSecond float64 // 0 unknown
	TokensPerMS    float64 // 0 unknown
}

// MSPerToken is the measured time to move one prompt token's KV, 0 when unknown.
func (p *Pairs) MSPerToken(from, to string) float64 {
	v, ok := p.rates.Load(pair{from, to})
	if !ok {
		return 0
	}
	if t := math.Float64frombits(v.(*rate).tokensPerMS.Load()); t > 0 {
		return 1 / t
	}
	return 0
}

// All lists what is known, in no order.
func (p *Pairs) All() []Seen {
	var out []Seen
	p.rates.Range(func(k, v any) bool {
		r := v.(*rate)
		out = append(out, Seen{
			From: k.(pair).from, To: k.(pair).to, Transfers: r.transfers.Load(),
			BytesPerSecond: math.Float64frombits(r.bytesPerSecond.Load()), TokensPerMS: math.Float64frombits(r.tokensPerMS.Load()),
		})
		return true
	})
	return out
}

// Forget drops what is known of a worker that has left.
func (p *Pairs) Forget(worker string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rates.Range(func(k, _ any) bool {
		if k.(pair).from == worker || k.(pair).to == worker {
			p.rates.Delete(k)
			p.count--
		}
		return true
	})
}
