package schedule

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"sluice/router/worker"
)

// BenchmarkSelect is the choice alone, booking and explain record included,
// with no overlap; BenchmarkSelectOverlap has a tenth of the ranks hold some.
func BenchmarkSelect(b *testing.B) {
	for _, n := range []int{8, 64, 1000} {
		for _, tokens := range []int{256, 4096, 32768} {
			b.Run(fmt.Sprintf("ranks=%d/tokens=%d", n, tokens), func(b *testing.B) {
				rs := ranks(n)
				for i, r := range rs {
					r.Feed.Store(uint32(worker.FeedLive))
					r.EventBlockSize.Store(16)
					r.PrefillTokens.Store(int64(i*7919) % 3000)
					r.DecodeBlocks.Store(int64(i*104729) % 500)
				}
				benchSelect(b, &Query{Candidates: rs, PromptTokens: tokens, MaxTokens: 256, RequestID: "r", Attempt: 1})
			})
		}
	}
}

// benchSelect reports CPU time beside wall time: on a shared machine only the
// former means anything.
func benchSelect(b *testing.B, q *Query) {
	s := New(plain)
	for range 3 { // the pool is known from its second sight
		c, _ := s.Choose(q)
		c.Reservation.Release()
	}
	b.ReportAllocs()
	before := cpuTime()
	n := 0
	for b.Loop() {
		c, _ := s.Choose(q)
		c.Reservation.Release()
		n++
	}
	b.ReportMetric(float64(cpuTime()-before)/float64(n), "cpu-ns/op")
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
