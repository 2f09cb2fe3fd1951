package obs

import (
	"fmt"
	"io"
	"math/bits"
	"strconv"
	"sync/atomic"
	"time"
)

// bounds are the bucket bounds of the duration histograms, in seconds: from a relayed response of
// a small model to a long generation. They are ordinary Prometheus le buckets, so that any
// dashboard can read them.
var bounds = [...]float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

var boundsNS, boundNames = func() (ns [len(bounds)]int64, names [len(bounds)]string) {
	for i, b := range bounds {
		ns[i] = int64(b * 1e9)
		names[i] = strconv.FormatFloat(b, 'g', -1, 64)
	}
	return ns, names
}()

// histogram counts durations. An observation is two atomic additions. A scrape reads the buckets
// one by one and may miss concurrent observations. It writes the sum of the buckets that it read
// as the count, so the buckets and the count of one exposition agree.
type histogram struct {
	buckets [len(bounds) + 1]atomic.Uint64
	sum     atomic.Int64 // nanoseconds
}

func (h *histogram) observe(d time.Duration) {
	if d < 0 {
		d = 0
	}
	lo, hi := 0, len(boundsNS)
	for lo < hi {
		mid := (lo + hi) / 2
		if boundsNS[mid] < int64(d) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	h.buckets[lo].Add(1)
	h.sum.Add(int64(d))
}

// write writes the series of one label set; labels is `a="b"` or empty. It writes nothing before
// the first observation.
func (h *histogram) write(w io.Writer, name, labels string) {
	sep := ""
	if labels != "" {
		sep = ","
	}
	var cum [len(bounds) + 1]uint64
	total := uint64(0)
	for i := range h.buckets {
		total += h.buckets[i].Load()
		cum[i] = total
	}
	if total == 0 {
		return
	}
	for i, le := range boundNames {
		fmt.Fprintf(w, "%s_bucket{%s%sle=%q} %d\n", name, labels, sep, le, cum[i])
	}
	fmt.Fprintf(w, "%s_bucket{%s%sle=\"+Inf\"} %d\n", name, labels, sep, total)
	if labels != "" {
		labels = "{" + labels + "}"
	}
	fmt.Fprintf(w, "%s_sum%s %g\n%s_count%s %d\n", name, labels, float64(h.sum.Load())/1e9, name, labels, total)
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
