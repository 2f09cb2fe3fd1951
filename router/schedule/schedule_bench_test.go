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
	s := New(testOptions)
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

// BenchmarkChooseJoint is both legs chosen together and booked, explain record
// included: without rates by pair, with them, and with the local alternative
// weighed too; two is the same by two single choices, to compare with.
func BenchmarkChooseJoint(b *testing.B) {
	for _, n := range []int{8, 64, 1000} {
		for _, kind := range []string{"two", "pair", "rates", "local"} {
			b.Run(fmt.Sprintf("ranks=%d/%s", n, kind), func(b *testing.B) {
				p, d := sides(n)
				for i := range n {
					p[i].PrefillTokens.Store(int64(i*7919) % 3000)
					d[i].DecodeBlocks.Store(int64(i*104729) % 500)
				}
				opt := testOptions
				opt.Explain = 64 // the ring has its room before the first measured choice
				s := New(opt)
				if kind == "rates" {
					s.SetTransferRate(func(from, to *worker.Rank) float64 { return 0.001 * float64(1+(from.Slot^to.Slot)&7) })
				}
				q := pairOf(p, d, 4096)
				q.RequestID, q.LocalWhenFaster = "r", kind == "local"
				q.Reservations = [2]*Reservation{new(Reservation), new(Reservation)}
				one, other := q.Query, q.Query
				one.Leg, one.Candidates, one.Reservation = PrefillLeg, p, q.Reservations[0]
				other.Leg, other.Candidates, other.Reservation = DecodeLeg, d, q.Reservations[1]
				for range 1000 {
					c, _ := s.ChooseJoint(q)
					c.Prefill.Reservation.Release()
					c.Decode.Reservation.Release()
				}
				b.ReportAllocs()
				for b.Loop() {
					if kind == "two" {
						x, _ := s.Choose(&one)
						y, _ := s.Choose(&other)
						x.Reservation.Release()
						y.Reservation.Release()
						continue
					}
					c, _ := s.ChooseJoint(q)
					c.Prefill.Reservation.Release()
					c.Decode.Reservation.Release()
				}
			})
		}
	}
}
