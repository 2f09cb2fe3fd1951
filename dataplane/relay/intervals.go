package relay

import (
	"sync/atomic"
	"time"
)

// IntervalBounds are the upper bounds of the buckets of Intervals, in seconds.
var IntervalBounds = [...]float64{0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5}

// intervalBoundsNS are IntervalBounds in nanoseconds.
var intervalBoundsNS = func() (ns [len(IntervalBounds)]int64) {
	for i, s := range IntervalBounds {
		ns[i] = int64(s*1e9 + 0.5)
	}
	return ns
}()

// Intervals counts the times between the events of one or many streams by duration. Streams add to
// it from any thread, two or three atomic additions for each read from the engine.
type Intervals struct {
	Buckets [len(IntervalBounds) + 1]atomic.Uint64 // the last one has no upper bound
	Sum     atomic.Int64                           // nanoseconds
	// Fine, when set, counts the same times in more detail. It must not block or allocate.
	Fine func(d time.Duration, n uint64)
	// Next, when set, counts the same times: those of one stream count for its model too.
	Next *Intervals
}

// Quantile returns the time that the share q of all counted times do not exceed, 0 if there are
// none. It interpolates within a bucket, so it is as exact as IntervalBounds are close.
func (v *Intervals) Quantile(q float64) time.Duration {
	var counts [len(v.Buckets)]uint64
	total := uint64(0)
	for i := range counts {
		counts[i] = v.Buckets[i].Load()
		total += counts[i]
	}
	rank := q * float64(total)
	low := int64(0)
	for i, n := range counts {
		if i == len(intervalBoundsNS) {
			break
		}
		if n > 0 && float64(n) >= rank {
			return time.Duration(low + int64(float64(intervalBoundsNS[i]-low)*rank/float64(n)))
		}
		rank -= float64(n)
		low = intervalBoundsNS[i]
	}
	if total == 0 {
		return 0
	}
	return time.Duration(low) // or longer: the last bucket has no bound
}

// observe counts n times of d each.
func (v *Intervals) observe(d time.Duration, n int64) {
	i := 0
	for i < len(intervalBoundsNS) && intervalBoundsNS[i] < int64(d) {
		i++
	}
	v.Buckets[i].Add(uint64(n))
	v.Sum.Add(int64(d) * n)
	if v.Fine != nil {
		v.Fine(d, uint64(n))
	}
	if v.Next != nil {
		v.Next.observe(d, n)
	}
}

// countIntervals counts the time since the last read that had events, from the first token on. The
// events of one read share it equally, because they arrived together. Events without a token, such
// as one with the usage at the end, count as the others do.
func (s *stream) countIntervals(events int64) {
	if last := s.lastEvent; !last.IsZero() {
		s.intervals.observe(time.Duration(int64(s.lastByte-last)/events), events)
	}
	s.lastEvent = s.lastByte
}
