package nixl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// A peer has the keys to the whole board, not only to its own slots. What it writes
// there, at full speed and while others write their records, ends no completion slot that it
// was not given; records that it destroys are the writer's to write again.
func TestRealForgedBoard(t *testing.T) {
	w := realNetwork()
	const slots, requests = 64, 300
	var mu sync.Mutex
	heard := map[CompletionSlot]Completion{}
	router, engine, hostile := w.open(t, Config{}), w.open(t, Config{}), w.open(t, Config{})
	b := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), router, slots, func(k CompletionSlot, c Completion) {
		mu.Lock()
		defer mu.Unlock()
		if _, again := heard[k]; again {
			t.Errorf("notified twice of %+v", k)
		}
		heard[k] = c
	}))
	reported := func(k CompletionSlot) (Completion, bool) {
		mu.Lock()
		defer mu.Unlock()
		c, ok := heard[k]
		return c, ok
	}
	out, arms, seen := hostMemory(t, engine, 4096), hostMemory(t, hostile, slots*recordBytes), hostMemory(t, hostile, slots*recordBytes)
	good, bad := connectAgents(t, engine, router), connectAgents(t, hostile, router)
	whole := b.memory.Remote(0, slots*recordBytes)

	// The hostile one reads the board too: it knows each nonce that was ever written.
	ctx, stop := context.WithCancel(t.Context())
	var forged atomic.Int64
	var attack sync.WaitGroup
	attack.Go(func() {
		old := rawRecord{}
		for round := 0; ctx.Err() == nil; round++ {
			if tr, err := hostile.Start(t.Context(), Read, []Span{{seen, 0, slots * recordBytes}}, bad, []Remote{whole}, nil); err != nil {
				t.Error(err)
				return
			} else if _, err := tr.Wait(t.Context()); err != nil {
				t.Error(err)
				return
			}
			var local []Span
			var remote []Remote
			for i := range slots {
				rec := arms.Bytes()[i*recordBytes : (i+1)*recordBytes]
				if w := rawRecordOf(seen.Bytes()[i*recordBytes:]); w[1] != 0 && w[6] == w.check() {
					old = w // a record that was reported once
				}
				switch (round + i) % 5 {
				case 0: // a flood of noise
					for j := range recordBytes / 8 {
						binary.LittleEndian.PutUint64(rec[8*j:], rand.Uint64())
					}
				case 1: // a nonce that is guessed; the sequence can be inferred from the board
					k := CompletionSlot{Index: uint32(i), Sequence: rawRecordOf(seen.Bytes()[i*recordBytes:])[7] + uint64(round%2), Nonce: rand.Uint64(), Request: uint64(i)}
					r := k.Record(Completion{Request: k.Request, Status: -1, Bytes: 666})
					copy(rec, r[:])
				case 2: // another slot's, or an earlier completion slot's
					for j, v := range old {
						binary.LittleEndian.PutUint64(rec[8*j:], v)
					}
				case 3: // nothing
					clear(rec)
				case 4: // an earlier nonce under the next sequence
					old[7]++
					old[0], old[3] = recordVersion|1<<32, 666
					old[6] = old.check()
					for j, v := range old {
						binary.LittleEndian.PutUint64(rec[8*j:], v)
					}
				}
				if round%3 == 0 { // torn: half of it
					local, remote = append(local, Span{arms, i * recordBytes, 32}), append(remote, b.memory.Remote(i*recordBytes+32*(round%2), 32))
				} else {
					local, remote = append(local, Span{arms, i * recordBytes, recordBytes}), append(remote, b.memory.Remote(i*recordBytes, recordBytes))
				}
			}
			tr, err := hostile.Start(t.Context(), Write, local, bad, remote, nil)
			if err == nil {
				_, err = tr.Wait(t.Context())
			}
			if err != nil {
				t.Error(err)
				return
			}
			forged.Add(slots)
		}
	})

	again := 0
	complete := func(i int, timeout time.Duration) {
		id := uint64(i)<<8 | 7
		k, ok := b.Acquire(id, time.Now().Add(time.Minute))
		if !ok {
			t.Fatal("no slot is free")
		}
		defer b.Release(k)
		want := Completion{Request: id, Bytes: id * 3, Duration: time.Duration(i) * time.Microsecond}
		rec := k.Record(want)
		for end := time.Now().Add(30 * time.Second); ; again++ {
			copy(out.Bytes(), rec[:])
			tr := must[*Transfer](t)(engine.Start(t.Context(), Write, []Span{{out, 0, recordBytes}}, good, []Remote{b.Remote(k)}, nil))
			must[Telemetry](t)(tr.Wait(t.Context()))
			var c Completion
			if testwait.Poll(timeout, func() (ok bool) { c, ok = reported(k); return ok }) {
				if c != want {
					t.Fatalf("notified of %+v, want %+v", c, want)
				}
				return
			}
			if time.Now().After(end) {
				t.Fatalf("slot %d was not reported within 30 s of writing it", i)
			}
		}
	}
	idle, ok := b.Acquire(1, time.Now().Add(time.Hour)) // nobody was given this one
	if !ok {
		t.Fatal("no slot is free")
	}
	for i := range requests {
		complete(i, 2*time.Millisecond)
	}
	stop()
	attack.Wait()
	if _, s := b.Poll(idle); s != Pending {
		t.Errorf("a completion slot that nobody was given is %v", s)
	}
	if n := router.Counters().Unmatched; n == 0 || forged.Load() == 0 {
		t.Errorf("%d records were forged, %d were counted as foreign", forged.Load(), n)
	}
	if err := router.Health(); err != nil {
		t.Error(err)
	}
	t.Logf("%d slots reported correctly beside %d forged records (%d foreign); %d had to be written again", requests, forged.Load(), router.Counters().Unmatched, again)
	// With the attack over, once is enough.
	again = 0
	for i := range slots {
		complete(requests+i, 20*time.Second)
	}
	if again != 0 {
		t.Errorf("%d of %d records had to be written again without an attack", again, slots)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(heard) != requests+slots {
		t.Errorf("notified of %d completions, %d were written", len(heard), requests+slots)
	}
}

// A reader of events that stands still: what arrives stays with NIXL, orders wait
// until their deadline and say so, nothing is lost, and the agent can be closed.
func TestRealRingsOverflow(t *testing.T) {
	w := realNetwork()
	const sent = 500
	gate := make(chan struct{})
	var next, wrong atomic.Int64
	b := w.open(t, Config{Commands: 16, Events: 16, OnNotification: func(m Notification) {
		<-gate
		if string(m.Message) != fmt.Sprint(next.Add(1)-1) {
			wrong.Add(1)
		}
	}})
	a := w.open(t, Config{})
	p, back := connectAgents(t, a, b), connectAgents(t, b, a)
	for i := range sent {
		if err := a.Notify(t.Context(), p, fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
	testwait.Until(t, "the ring of events to be full", func() bool {
		r := b.driver.(*thread).ring
		return r.head.evtTail.Load()-r.head.evtHead.Load() >= 15
	})
	// Orders: none is executed while its answer would have no place.
	short := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := b.Metadata(ctx)
		return err
	}
	for range 3 {
		if err := short(); !errors.Is(err, ErrHung) {
			t.Errorf("an order while the events are full: %v; want ErrHung", err)
		}
	}
	posted := 0
	for ; posted < 100; posted++ {
		if err := b.Post(back, []byte("x")); err != nil {
			if !errors.Is(err, ErrFull) {
				t.Errorf("a post while the orders are full: %v; want ErrFull", err)
			}
			break
		}
	}
	if posted == 0 || posted > 16 {
		t.Errorf("%d posts went into a ring of 16 that holds three orders", posted)
	}
	if err := short(); !errors.Is(err, ErrFull) {
		t.Errorf("an order while the orders are full: %v; want ErrFull", err)
	}
	close(gate)
	testwait.Until(t, "everything that was sent", func() bool { return next.Load() == sent })
	if wrong.Load() != 0 || b.Counters().Unread != 0 {
		t.Errorf("%d of %d out of order, %d unread", wrong.Load(), sent, b.Counters().Unread)
	}
	if _, err := b.Metadata(t.Context()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// Closing an agent with more transfers in flight than there are places for their ends.
func TestRealCloseWithTransfersUnderWay(t *testing.T) {
	w := realNetwork()
	const size, many = 8 << 20, 64
	a, b := w.open(t, Config{Events: 16, Commands: 128}), w.open(t, Config{})
	src, dst := hostMemory(t, a, size), hostMemory(t, b, size)
	p := connectAgents(t, a, b)
	var all []*Transfer
	for range many {
		all = append(all, must[*Transfer](t)(a.Start(t.Context(), Write, []Span{{src, 0, size}}, p, []Remote{dst.Remote(0, size)}, nil)))
	}
	began := time.Now()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > a.cfg.CallTimeout*9/10 {
		t.Errorf("closing took %s: its answer was waited for", took)
	}
	ended := map[Status]int{}
	for _, tr := range all {
		select {
		case <-tr.Done():
			ended[tr.Status()]++
		case <-time.After(20 * time.Second):
			t.Fatal("a transfer of a closed agent has not ended")
		}
	}
	t.Logf("closed in %s; transfers: %v", time.Since(began), ended)
}

// A handler that does not come back must not block Close without end.
func TestRealCloseWithAHandlerThatHangs(t *testing.T) {
	search := realNIXL(t)
	gate, entered := make(chan struct{}), make(chan struct{}, 1)
	b := must[*Agent](t)(Open(t.Context(), Config{Name: "stuck", Search: search, CallTimeout: 300 * time.Millisecond, OnNotification: func(Notification) {
		entered <- struct{}{}
		<-gate
	}}))
	defer close(gate)
	a := realNetwork().open(t, Config{})
	if err := a.Notify(t.Context(), connectAgents(t, a, b), []byte("x")); err != nil {
		t.Fatal(err)
	}
	<-entered
	done := make(chan error, 1)
	go func() { done <- b.Close() }()
	select {
	case err := <-done:
		if !errors.Is(err, ErrHung) {
			t.Errorf("%v; want ErrHung", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("Close waits for a handler that hangs")
	}
}
