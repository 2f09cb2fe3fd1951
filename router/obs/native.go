package obs

import (
	"math"
	"sync/atomic"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// A native histogram of schema 3 has 8 buckets for each power of two; a bucket is 9 % wide. Bucket
// i has the observations in seconds in (2^((i-1)/8), 2^(i/8)].
const (
	nativeSchema   = 3
	nativePerPower = 1 << nativeSchema
	// Observations below 2^nativeFrom s (61 µs) count in the zero bucket, those above 2^nativeTo s
	// (34 minutes) in the last one.
	nativeFrom, nativeTo = -14, 11
	nativeCount          = (nativeTo - nativeFrom) * nativePerPower
)

// nativeFractions are the bounds within one power of two: 2^(i/8) in 63-bit fixed point with the
// highest bit for 1.
var nativeFractions = func() (f [nativePerPower]uint64) {
	for i := range f {
		f[i] = uint64(math.Exp2(float64(i)/nativePerPower) * (1 << 63))
	}
	return f
}()

// nativeBuckets are the buckets of a native histogram: a fixed array, so that an observation is one
// atomic addition and nothing grows. They take 1.6 KiB.
type nativeBuckets struct {
	zero    atomic.Uint64
	buckets [nativeCount]atomic.Uint64
}

func (n *nativeBuckets) observe(d time.Duration) { n.observeN(d, 1) }

// observeN counts d times times.
func (n *nativeBuckets) observeN(d time.Duration, times uint64) {
	if i := nativeIndex(d); i < 0 {
		n.zero.Add(times)
	} else {
		n.buckets[i].Add(times)
	}
}

var nativeZeroNS = int64(math.Exp2(nativeFrom) * 1e9)

// nativeIndex returns the index in nativeBuckets.buckets, or -1 for the zero bucket.
func nativeIndex(d time.Duration) int {
	if int64(d) <= nativeZeroNS {
		return -1
	}
	// seconds = fraction / 2^63 * 2^exponent, with the fraction's highest bit set.
	fraction := math.Float64bits(d.Seconds())
	exponent := int(fraction>>52&0x7ff) - 1023
	fraction = (fraction<<11 | 1<<63)
	i := 0
	for i < nativePerPower && nativeFractions[i] < fraction {
		i++
	}
	// A value that is itself a bound belongs to the bucket below it.
	return min((exponent-nativeFrom)*nativePerPower+i-1, nativeCount-1)
}

// addTo adds the native buckets to h: spans of buckets with observations, and the differences
// between neighbours.
func (n *nativeBuckets) addTo(h *dto.Histogram) {
	schema, threshold, zero := int32(nativeSchema), math.Exp2(nativeFrom), n.zero.Load()
	h.Schema, h.ZeroThreshold, h.ZeroCount = &schema, &threshold, &zero
	total, last := zero, int64(0)
	next := int32(0) // the index that would continue the last span
	for i := range n.buckets {
		count := n.buckets[i].Load()
		if count == 0 {
			continue
		}
		total += count
		at := int32(i + nativeFrom*nativePerPower + 1)
		if len(h.PositiveSpan) == 0 || at != next {
			offset, length := at-next, uint32(0)
			h.PositiveSpan = append(h.PositiveSpan, &dto.BucketSpan{Offset: &offset, Length: &length})
		}
		span := h.PositiveSpan[len(h.PositiveSpan)-1]
		*span.Length++
		next = at + 1
		h.PositiveDelta = append(h.PositiveDelta, int64(count)-last)
		last = int64(count)
	}
	if len(h.PositiveSpan) == 0 { // marks a native histogram that has no observation above the zero bucket
		offset, length := int32(0), uint32(0)
		h.PositiveSpan = append(h.PositiveSpan, &dto.BucketSpan{Offset: &offset, Length: &length})
	}
	// The count must be the sum of the buckets. The classic buckets were read a moment before; both
	// have all observations but those of that moment.
	if total != h.GetSampleCount() {
		h.SampleCount = &total
		for _, b := range h.Bucket {
			if b.GetCumulativeCount() > total {
				b.CumulativeCount = &total
			}
		}
	}
}
