package relay

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestIntervalQuantiles compares Quantile with the sorted times: both lie in the same bucket.
func TestIntervalQuantiles(t *testing.T) {
	bucketOf := func(d time.Duration) int {
		i, _ := slices.BinarySearch(intervalBoundsNS[:], int64(d))
		return i
	}
	for range 200 {
		var model Intervals
		v := Intervals{Next: &model}
		var times []time.Duration
		for range 1 + rand.IntN(300) {
			d := time.Duration(rand.ExpFloat64() * float64(20*time.Millisecond))
			v.observe(d, 2)
			times = append(times, d, d)
		}
		slices.Sort(times)
		for _, q := range []float64{0.5, 0.9, 0.99, 1} {
			want := times[max(int(q*float64(len(times))+0.999999)-1, 0)]
			if got := v.Quantile(q); bucketOf(got) != bucketOf(want) || model.Quantile(q) != got {
				t.Fatalf("the %v quantile of %d times is %v, and %v in the next; want about %v", q, len(times), got, model.Quantile(q), want)
			}
		}
	}
	var none Intervals
	if d := none.Quantile(0.5); d != 0 {
		t.Errorf("the quantile of nothing is %v", d)
	}
	none.observe(time.Hour, 1)
	if d := none.Quantile(0.5); d != 5*time.Second {
		t.Errorf("the quantile beyond the last bound is %v, want that bound", d)
	}
}
