package obs

import (
	"encoding/hex"
	"math"
	"math/bits"
	"sync/atomic"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"sluice/dataplane/relay"
)

// bucketBounds are the upper bounds of a histogram's classic buckets.
type bucketBounds struct {
	seconds []float64
	ns      []int64
}

func newBounds(seconds ...float64) *bucketBounds {
	b := &bucketBounds{seconds: seconds, ns: make([]int64, len(seconds))}
	for i, s := range seconds {
		b.ns[i] = int64(math.Round(s * 1e9))
	}
	return b
}

// The bounds of the histograms. relay.IntervalBounds has those of the time between tokens.
var (
	// durationBounds reach from a relayed response of a small model to a long generation.
	durationBounds   = newBounds(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
	firstTokenBounds = newBounds(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
	queueBounds      = newBounds(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)
	transferBounds   = newBounds(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
	intervalBounds   = newBounds(relay.IntervalBounds[:]...)
)

// histogram counts durations. An observation is two atomic additions, three with a native
// histogram. A scrape reads the buckets one by one and may miss concurrent observations. It reports
// the sum of the buckets that it read as the count, so the buckets and the count of one exposition
// agree.
type histogram struct {
	bounds    *bucketBounds
	buckets   []atomic.Uint64            // the last one has no upper bound
	sum       atomic.Int64               // nanoseconds
	native    *nativeBuckets             // nil: classic buckets only
	exemplars []atomic.Pointer[exemplar] // by bucket; nil: none
}

// newHistogram returns an empty histogram.
func newHistogram(bounds *bucketBounds, native bool) *histogram {
	h := &histogram{bounds: bounds, buckets: make([]atomic.Uint64, len(bounds.ns)+1)}
	if native {
		h.native = new(nativeBuckets)
	}
	return h
}

// withExemplars makes observeTraced keep exemplars.
func (h *histogram) withExemplars() *histogram {
	h.exemplars = make([]atomic.Pointer[exemplar], len(h.buckets))
	return h
}

func (h *histogram) observe(d time.Duration) { h.observeBucket(max(d, 0)) }

// observeBucket is observe for d that is not negative. It returns the index of the bucket.
func (h *histogram) observeBucket(d time.Duration) int {
	ns := h.bounds.ns
	lo, hi := 0, len(ns)
	for lo < hi {
		mid := (lo + hi) / 2
		if ns[mid] < int64(d) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	h.buckets[lo].Add(1)
	h.sum.Add(int64(d))
	if h.native != nil {
		h.native.observe(d)
	}
	return lo
}

// Buckets are the counts of a histogram's buckets.
type Buckets struct {
	bounds []float64 // upper bounds in seconds; the last count has none
	counts []uint64
}

func (h *histogram) copy() Buckets {
	b := Buckets{bounds: h.bounds.seconds, counts: make([]uint64, len(h.buckets))}
	for i := range h.buckets {
		b.counts[i] = h.buckets[i].Load()
	}
	return b
}

// Since returns the observations between an earlier copy, which may be the zero Buckets, and b.
func (b Buckets) Since(earlier Buckets) Buckets {
	out := Buckets{bounds: b.bounds, counts: append([]uint64(nil), b.counts...)}
	for i, n := range earlier.counts {
		out.counts[i] -= n
	}
	return out
}

// Quantile estimates the duration below which a share q (0…1) of the observations lies, by linear
// interpolation in its bucket, as PromQL's histogram_quantile does. It is the highest bound for what
// lies above, and 0 without observations.
func (b Buckets) Quantile(q float64) time.Duration {
	total := uint64(0)
	for _, n := range b.counts {
		total += n
	}
	if total == 0 {
		return 0
	}
	rank, seen, lower := q*float64(total), float64(0), float64(0)
	for i, upper := range b.bounds {
		n := float64(b.counts[i])
		if n > 0 && seen+n >= rank {
			return time.Duration((lower + (upper-lower)*max(rank-seen, 0)/n) * float64(time.Second))
		}
		seen += n
		lower = upper
	}
	return time.Duration(lower * float64(time.Second))
}

// exemplar names the trace of one observation.
type exemplar struct {
	trace [16]byte
	value time.Duration
	at    time.Time
}

// exemplarInterval bounds how often a bucket's exemplar is replaced, and with it what exemplars
// allocate: one exemplar for each bucket in that time.
const exemplarInterval = time.Second

// observeTraced is observe for a request with a trace; the zero trace is none.
func (h *histogram) observeTraced(d time.Duration, trace [16]byte) {
	d = max(d, 0)
	at := h.observeBucket(d)
	if trace == ([16]byte{}) || h.exemplars == nil {
		return
	}
	now := time.Now()
	if last := h.exemplars[at].Load(); last == nil || now.Sub(last.at) >= exemplarInterval {
		h.exemplars[at].Store(&exemplar{trace, d, now})
	}
}

// collect adds the series of one set of labels. It adds nothing before the first observation.
func (h *histogram) collect(p *page, name string, labels ...string) {
	counts := make([]uint64, len(h.buckets))
	for i := range h.buckets {
		counts[i] = h.buckets[i].Load()
	}
	addHistogram(p, name, h.bounds.seconds, counts, float64(h.sum.Load())/1e9, h, labels)
}

// addHistogram adds a histogram with the counts of its buckets. from has the native buckets and
// exemplars; nil: none.
func addHistogram(p *page, name string, bounds []float64, counts []uint64, sum float64, from *histogram, labels []string) {
	total := uint64(0)
	for i, n := range counts {
		total += n
		counts[i] = total
	}
	if total == 0 {
		return
	}
	buckets, out := make([]dto.Bucket, len(bounds)), make([]*dto.Bucket, len(bounds), len(bounds)+1)
	for i := range bounds {
		b := &buckets[i]
		b.UpperBound, b.CumulativeCount = &bounds[i], &counts[i]
		if from != nil && from.exemplars != nil {
			b.Exemplar = from.exemplars[i].Load().proto()
		}
		out[i] = b
	}
	h := &dto.Histogram{SampleCount: &total, SampleSum: &sum, Bucket: out}
	if from != nil && from.exemplars != nil {
		if e := from.exemplars[len(bounds)].Load().proto(); e != nil {
			inf := math.Inf(1)
			h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: &inf, CumulativeCount: &total, Exemplar: e})
		}
	}
	if from != nil && from.native != nil {
		from.native.addTo(h)
	}
	f := p.family(name)
	f.Metric = append(f.Metric, &dto.Metric{Label: labelPairs(labels...), Histogram: h})
}

func (e *exemplar) proto() *dto.Exemplar {
	if e == nil {
		return nil
	}
	seconds := e.value.Seconds()
	return &dto.Exemplar{Label: labelPairs("trace_id", hex.EncodeToString(e.trace[:])), Value: &seconds, Timestamp: timestamppb.New(e.at)}
}

// fineBuckets is eight linear steps for each power of two of nanoseconds, so the error of a
// quantile is at most 12.5 %.
const fineBuckets = 64 * 8

// fineHistogram is a histogram with enough resolution for quantiles: see Distribution.Quantile.
type fineHistogram struct{ buckets [fineBuckets]atomic.Uint64 }

func (f *fineHistogram) observe(d time.Duration) { f.buckets[fineIndex(d)].Add(1) }

func fineIndex(d time.Duration) int {
	ns := uint64(max(d, 1))
	top := bits.Len64(ns) - 1
	step := ns << (63 - top) >> 60 & 7
	return top*8 + int(step)
}

// fineValue returns the midpoint of a bucket.
func fineValue(i int) time.Duration {
	lo := float64(uint64(1) << (i / 8))
	return time.Duration(lo * (1 + (float64(i%8)+0.5)/8))
}

// Distribution is a copy of a fineHistogram: observation counts since the process started.
type Distribution [fineBuckets]uint64

func (f *fineHistogram) copyTo(d *Distribution) {
	for i := range f.buckets {
		d[i] = f.buckets[i].Load()
	}
}

// Since returns the observations between an earlier copy and d, and their number.
func (d *Distribution) Since(earlier *Distribution) (out Distribution, n uint64) {
	for i := range d {
		out[i] = d[i] - earlier[i]
		n += out[i]
	}
	return out, n
}

// Quantile returns the duration below which a share q (0…1) of the observations lies, within 12.5
// %. It returns 0 if there are no observations.
func (d *Distribution) Quantile(q float64) time.Duration {
	total := uint64(0)
	for _, n := range d {
		total += n
	}
	if total == 0 {
		return 0
	}
	want := max(1, uint64(q*float64(total)+0.999999))
	seen := uint64(0)
	for i, n := range d {
		if seen += n; seen >= want {
			return fineValue(i)
		}
	}
	return 0
}
