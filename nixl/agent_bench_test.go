package nixl

import (
	"errors"
	"slices"
	"testing"
	"time"

	"sluice/native/dl"
)

// BenchmarkBoardRequest is what a request pays on its way: a completion slot, a look, the
// end. No cgo, no lock, no allocation; at most 300 ns.
func BenchmarkBoardRequest(b *testing.B) {
	b.Run("serial", func(b *testing.B) {
		board := must[*CompletionBoard](b)(NewCompletionBoard(b.Context(), nil, 1<<16, nil))
		until := time.Now().Add(time.Hour)
		b.ReportAllocs()
		for b.Loop() {
			k, _ := board.Acquire(1, until)
			board.Poll(k)
			board.Release(k)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		board := must[*CompletionBoard](b)(NewCompletionBoard(b.Context(), nil, 1<<16, nil))
		until := time.Now().Add(time.Hour)
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if k, ok := board.Acquire(1, until); ok {
					board.Poll(k)
					board.Release(k)
				}
			}
		})
	})
	b.Run("complete", func(b *testing.B) {
		board := must[*CompletionBoard](b)(NewCompletionBoard(b.Context(), nil, 1<<16, nil))
		until := time.Now().Add(time.Hour)
		b.ReportAllocs()
		for b.Loop() {
			k, _ := board.Acquire(1, until)
			if board.CompleteNotified(k.Index, k.Nonce, Completion{}) != nil {
				b.Fatal("refused")
			}
			board.Release(k)
		}
	})
}

// BenchmarkCgoCall is what the rings save: one call into C that does nothing.
func BenchmarkCgoCall(b *testing.B) {
	for b.Loop() {
		dl.ABI()
	}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	board := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), nil, 64, func(CompletionSlot, Completion) {}))
	until := time.Now().Add(time.Hour)
	if n := testing.AllocsPerRun(1000, func() {
		k, _ := board.Acquire(1, until)
		board.Poll(k)
		if board.CompleteNotified(k.Index, k.Nonce, Completion{}) != nil {
			t.Fatal("refused")
		}
		board.Release(k)
		board.Expire(until, 8)
	}); n != 0 {
		t.Errorf("a request on the board allocates %v times", n)
	}
	r := must[*ring](t)(newRing(16, 16))
	defer r.free()
	message := []byte("SLUICE1 a report of usual length, about a hundred bytes, as the connector sends it, with an id")
	c := command{op: opNotify, handle: 1, data: message}
	if n := testing.AllocsPerRun(1000, func() {
		if r.push(&c) != nil {
			t.Fatal("full")
		}
		// As the thread does: the slot goes back to the producers.
		at := r.head.cmdHead.Load()
		r.commands[at&15].seq.Store(at + 16)
		r.head.cmdHead.Store(at + 1)
		r.expect(1)
		r.expect(-1)
	}); n != 0 {
		t.Errorf("a push allocates %v times", n)
	}
	seen := 0
	sink := func(e *event) { seen += len(e.data) }
	if n := testing.AllocsPerRun(1000, func() {
		at := r.head.evtTail.Load()
		r.events[at&15].op, r.events[at&15].length = evNotif, 100
		r.head.evtTail.Store(at + 1)
		if !r.pop(sink) {
			t.Fatal("nothing came")
		}
	}); n != 0 || seen == 0 {
		t.Errorf("an event allocates %v times", n)
	}
}

func TestRealPostDoesNotAllocate(t *testing.T) {
	w := realNetwork()
	a, peer := w.open(t, Config{}), w.open(t, Config{})
	p := connectAgents(t, a, peer)
	message := []byte("SLUICE1 recv ok - - 0 0 0/0/1 d0 chatcmpl-1")
	if n := testing.AllocsPerRun(500, func() {
		if err := a.Post(p, message); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("Post allocates %v times", n)
	}
}

// BenchmarkRealPost is one notification pushed from Go while the thread is busy
// taking them: ns/op is the pace of the whole way into NIXL, push-ns/op what the
// caller pays.
func BenchmarkRealPost(b *testing.B) {
	w := realNetwork()
	a := w.open(b, Config{})
	peer := w.open(b, Config{OnNotification: func(Notification) {}})
	p := connectAgents(b, a, peer)
	message := []byte("SLUICE1 a report of usual length, about a hundred bytes, as the connector sends it, with an id")
	b.ReportAllocs()
	var full time.Duration
	for b.Loop() {
		for {
			err := a.Post(p, message)
			if err == nil {
				break
			}
			if !errors.Is(err, ErrFull) {
				b.Fatal(err)
			}
			began := time.Now()
			time.Sleep(20 * time.Microsecond)
			full += time.Since(began)
		}
	}
	b.ReportMetric(float64(b.Elapsed()-full)/float64(b.N), "push-ns/op")
}

// BenchmarkRealRing is the way through both rings and the thread, without NIXL: an
// order that the thread refuses at once.
func BenchmarkRealRing(b *testing.B) {
	a := realNetwork().open(b, Config{Commands: 4096, Events: 16384})
	a.driver.expect(1) // awake
	defer a.driver.expect(-1)
	c := command{op: 999, token: 1 << 60}
	b.ReportAllocs()
	for b.Loop() {
		for a.driver.push(&c) != nil {
			time.Sleep(5 * time.Microsecond)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds()/1e6, "M/s")
}

func quantiles(b *testing.B, d []time.Duration) {
	slices.Sort(d)
	if len(d) > 0 {
		b.ReportMetric(float64(d[len(d)/2].Nanoseconds())/1e3, "p50-µs")
		b.ReportMetric(float64(d[len(d)*99/100].Nanoseconds())/1e3, "p99-µs")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkRealWriteVisible: a record of 64 bytes, from the order to write it until
// it is seen in the board's memory by loads, and until the board's owner is notified.
func BenchmarkRealWriteVisible(b *testing.B) {
	for _, how := range []string{"seen", "notified"} {
		b.Run(how, func(b *testing.B) {
			w := realNetwork()
			heard := make(chan struct{}, 1)
			tell := func(CompletionSlot, Completion) {
				select {
				case heard <- struct{}{}:
				default:
				}
			}
			router, engine := w.open(b, Config{}), w.open(b, Config{})
			board := must[*CompletionBoard](b)(NewCompletionBoard(b.Context(), router, 64, tell))
			out := hostMemory(b, engine, 4096)
			p := connectAgents(b, engine, router)
			engine.driver.expect(1) // awake, so that it is NIXL that is measured
			defer engine.driver.expect(-1)
			var all []time.Duration
			for b.Loop() {
				k, _ := board.Acquire(1, time.Now().Add(time.Minute))
				rec := k.Record(Completion{Request: 1})
				copy(out.Bytes(), rec[:])
				began := time.Now()
				tr, err := engine.Start(b.Context(), Write, []Span{{out, 0, 64}}, p, []Remote{board.Remote(k)}, nil)
				if err != nil {
					b.Fatal(err)
				}
				if how == "seen" {
					for s, end := Pending, began.Add(5*time.Second); s != Completed; _, s = board.Poll(k) {
						if time.Since(began) > time.Second && time.Now().After(end) {
							b.Fatal("the record was not seen within 5s")
						}
					}
				} else {
					<-heard
				}
				all = append(all, time.Since(began))
				if _, err := tr.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
				board.Release(k)
			}
			quantiles(b, all)
		})
	}
}

func BenchmarkRealRegister64MiB(b *testing.B) {
	a := realNetwork().open(b, Config{})
	m := must[*Memory](b)(NewHostMemory(64 << 20))
	for b.Loop() {
		if err := a.Register(b.Context(), m); err != nil {
			b.Fatal(err)
		}
		if err := a.Deregister(b.Context(), m); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRealWrite64MiB(b *testing.B) {
	w := realNetwork()
	x, y := w.open(b, Config{}), w.open(b, Config{})
	src, dst := hostMemory(b, x, 64<<20), hostMemory(b, y, 64<<20)
	p := connectAgents(b, x, y)
	b.SetBytes(64 << 20)
	for b.Loop() {
		tr, err := x.Start(b.Context(), Write, []Span{{src, 0, 64 << 20}}, p, []Remote{dst.Remote(0, 64<<20)}, nil)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := tr.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
