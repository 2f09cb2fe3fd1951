package nixl

import (
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

type completionEvent struct {
	t CompletionSlot
	c Completion
}

// testBoardByWrite lets a peer write records into slots, right and wrong ones.
func testBoardByWrite(t *testing.T, w agentNetwork) {
	router, engine := w.open(t, Config{}), w.open(t, Config{})
	heard := make(chan completionEvent, 64)
	b := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), router, 128, func(k CompletionSlot, c Completion) { heard <- completionEvent{k, c} }))
	out := hostMemory(t, engine, 4096)
	p := connectAgents(t, engine, router)
	write := func(to CompletionSlot, rec [recordBytes]byte) {
		t.Helper()
		copy(out.Bytes(), rec[:])
		tr := must[*Transfer](t)(engine.Start(t.Context(), Write, []Span{{out, 0, recordBytes}}, p, []Remote{b.Remote(to)}, nil))
		must[Telemetry](t)(tr.Wait(t.Context()))
	}
	silent := func(why string) {
		t.Helper()
		select {
		case h := <-heard:
			t.Errorf("%s: notified of %+v", why, h)
		case <-time.After(20 * time.Millisecond):
		}
	}
	for i := range 3 * b.Slots() { // every slot is used three times
		k, ok := b.Acquire(uint64(1000+i), time.Now().Add(time.Minute))
		if !ok {
			t.Fatal("no slot is free")
		}
		want := Completion{Request: k.Request, Worker: 7, Rank: uint32(i), Status: int32(-i), Bytes: 1 << 40, Duration: 1500 * time.Microsecond}
		write(k, k.Record(want))
		select {
		case h := <-heard:
			if h.t != k || h.c != want {
				t.Fatalf("notified of %+v, want %+v of %+v", h, want, k)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("write %d was not seen", i)
		}
		if c, s := b.Poll(k); s != Completed || c != want {
			t.Fatalf("Look: %+v, %v", c, s)
		}
		b.Release(k)
		if _, s := b.Poll(k); s != Released {
			t.Fatalf("after release: %v", s)
		}
	}

	k, _ := b.Acquire(1, time.Now().Add(time.Minute))
	forged := k
	forged.Nonce++
	write(k, forged.Record(Completion{Request: 1}))
	silent("another nonce")
	late := k
	late.Sequence--
	write(k, late.Record(Completion{Request: 1}))
	silent("an older sequence")
	other := k.Record(Completion{Request: 2})
	write(k, other)
	silent("another request")
	torn := k.Record(Completion{Request: 1, Bytes: 5})
	torn[24] = 6
	write(k, torn)
	silent("a changed byte")
	if _, s := b.Poll(k); s != Pending {
		t.Errorf("after four wrong records: %v, want Pending", s)
	}
	if w.fake == nil {
		if n := router.Counters().Unmatched; n < 2 {
			t.Errorf("%d unmatched records were counted, want at least the forged and the late one", n)
		}
	}
	b.Release(k)

	// The next completion slots' slots have the old records in them; they do not count.
	var all []CompletionSlot
	for range b.Slots() {
		k, ok := b.Acquire(9, time.Now().Add(time.Minute))
		if !ok {
			t.Fatal("no slot is free")
		}
		all = append(all, k)
	}
	silent("old records")
	if _, ok := b.Acquire(9, time.Now()); ok {
		t.Error("more completion slots than slots")
	}
	for _, k := range all {
		b.Release(k)
	}
}

// testBoardUnderLoad has many requests in flight at once, over few slots.
func testBoardUnderLoad(t *testing.T, w agentNetwork) {
	router, engine := w.open(t, Config{}), w.open(t, Config{})
	const workers, each = 4, 100
	var mu sync.Mutex
	heard := map[uint64]Completion{}
	b := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), router, 64, func(k CompletionSlot, c Completion) {
		mu.Lock()
		heard[k.Request] = c
		mu.Unlock()
	}))
	out := hostMemory(t, engine, workers*4096)
	p := connectAgents(t, engine, router)
	var wg sync.WaitGroup
	for g := range workers {
		wg.Go(func() {
			for i := range each {
				id := uint64(g)<<32 | uint64(i) | 1<<60
				k, ok := b.Acquire(id, time.Now().Add(time.Minute))
				if !ok {
					t.Error("no slot is free")
					return
				}
				rec := k.Record(Completion{Request: id, Bytes: id})
				copy(out.Bytes()[g*4096:], rec[:])
				tr, err := engine.Start(t.Context(), Write, []Span{{out, g * 4096, recordBytes}}, p, []Remote{b.Remote(k)}, nil)
				if err == nil {
					_, err = tr.Wait(t.Context())
				}
				if err != nil {
					t.Error(err)
					return
				}
				seen := testwait.Poll(5*time.Second, func() bool {
					mu.Lock()
					c, ok := heard[id]
					mu.Unlock()
					if ok && c.Bytes != id {
						t.Errorf("%x: notified of %+v", id, c)
					}
					if ok {
						return true
					}
					_, s := b.Poll(k)
					return s == Completed // Look was first
				})
				if !seen {
					t.Errorf("%x was not seen", id)
					return
				}
				b.Release(k)
			}
		})
	}
	wg.Wait()
}

func TestBoardByNotification(t *testing.T) {
	var heard []completionEvent
	b := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), nil, 64, func(k CompletionSlot, c Completion) { heard = append(heard, completionEvent{k, c}) }))
	k, _ := b.Acquire(77, time.Now().Add(time.Minute))
	for name, try := range map[string]struct {
		slot  uint32
		nonce uint64
	}{"another nonce": {k.Index, k.Nonce + 1}, "another slot": {k.Index + 1, k.Nonce}, "beyond the board": {64, k.Nonce}, "a slot never lent": {k.Index + 1, 0}} {
		if err := b.CompleteNotified(try.slot, try.nonce, Completion{}); !errors.Is(err, ErrForged) {
			t.Errorf("%s: %v, want ErrForged", name, err)
		}
	}
	if err := b.CompleteNotified(k.Index, k.Nonce, Completion{Bytes: 5}); err != nil {
		t.Fatal(err)
	}
	if len(heard) != 1 || heard[0].c != (Completion{Request: 77, Bytes: 5}) || heard[0].t != k {
		t.Errorf("notified of %+v", heard)
	}
	if err := b.CompleteNotified(k.Index, k.Nonce, Completion{}); !errors.Is(err, ErrLate) {
		t.Errorf("a second time: %v, want ErrLate", err)
	}
	b.Release(k)
	b.Release(k) // does nothing
	for range 64 {
		n, ok := b.Acquire(1, time.Now())
		if !ok {
			t.Fatal("a slot was lost")
		}
		if n.Index == k.Index {
			if err := b.CompleteNotified(k.Index, k.Nonce, Completion{}); !errors.Is(err, ErrForged) {
				t.Errorf("the last completion slot's notification: %v, want ErrForged", err)
			}
			if _, s := b.Poll(n); s != Pending {
				t.Errorf("it ended the next completion slot: %v", s)
			}
		}
	}
	if b.Refused() != 6 {
		t.Errorf("refused %d, want 6", b.Refused())
	}
}

func TestBoardExpires(t *testing.T) {
	b := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), nil, 64, nil))
	now := time.Now()
	soon, _ := b.Acquire(1, now.Add(time.Second))
	later, _ := b.Acquire(2, now.Add(time.Hour))
	done, _ := b.Acquire(3, now.Add(time.Second))
	if err := b.CompleteNotified(done.Index, done.Nonce, Completion{}); err != nil {
		t.Fatal(err)
	}
	if n := b.Expire(now, 64); n != 0 {
		t.Errorf("%d expired before their time", n)
	}
	n := 0
	for range 8 { // eight slots at a time
		n += b.Expire(now.Add(2*time.Second), 8)
	}
	if n != 1 {
		t.Errorf("%d expired without a completion, want 1", n)
	}
	for k, want := range map[CompletionSlot]State{soon: Released, later: Pending, done: Released} {
		if _, s := b.Poll(k); s != want {
			t.Errorf("request %d: %v, want %v", k.Request, s, want)
		}
	}
	got := 0
	for range 64 {
		if _, ok := b.Acquire(0, now); ok {
			got++
		}
	}
	if got != 63 {
		t.Errorf("%d slots are free again, want 63", got)
	}
}

// TestBoardRaces has all ends of a completion slot at once: one wins, and no slot is lost.
func TestBoardRaces(t *testing.T) {
	var mu sync.Mutex
	reported := map[CompletionSlot]int{}
	b := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), nil, 64, func(k CompletionSlot, _ Completion) {
		mu.Lock()
		reported[k]++
		mu.Unlock()
	}))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				k, ok := b.Acquire(rand.Uint64(), time.Now().Add(time.Microsecond))
				if !ok {
					continue
				}
				var in sync.WaitGroup
				in.Go(func() { _ = b.CompleteNotified(k.Index, k.Nonce, Completion{}) })
				in.Go(func() { b.Poll(k) })
				in.Go(func() { b.Expire(time.Now(), 16) })
				in.Go(func() { b.Release(k) })
				in.Wait()
			}
		})
	}
	wg.Wait()
	for k, n := range reported {
		if n != 1 {
			t.Errorf("%+v was reported %d times", k, n)
		}
	}
	b.Expire(time.Now().Add(time.Hour), 64)
	for i := range 64 {
		if _, ok := b.Acquire(0, time.Now()); !ok {
			t.Fatalf("only %d of 64 slots are left", i)
		}
	}
}

func TestBoardRefusesSizes(t *testing.T) {
	for _, n := range []int{0, -64, 63, MaxSlots + 64} {
		if _, err := NewCompletionBoard(t.Context(), nil, n, nil); err == nil {
			t.Errorf("a board of %d slots was made", n)
		}
	}
}

// TestBoardByMessage: a record that comes as a message ends its completion slot, and no other.
func TestBoardByMessage(t *testing.T) {
	var heard []completionEvent
	b := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), nil, 64, func(k CompletionSlot, c Completion) { heard = append(heard, completionEvent{k, c}) }))
	k, _ := b.Acquire(7, time.Now().Add(time.Minute))
	message := func(slot uint32, rec [recordBytes]byte) []byte {
		m := []byte(MessagePrefix)
		m = append(m, byte(slot), byte(slot>>8), byte(slot>>16), byte(slot>>24))
		return append(m, rec[:]...)
	}
	want := Completion{Request: 7, Rank: 2, Bytes: 4096, Duration: time.Millisecond}
	good := message(k.Index, k.Record(want))
	forged := CompletionSlot{Index: k.Index, Sequence: k.Sequence, Nonce: k.Nonce + 1, Request: 7}
	torn := append([]byte(nil), good...)
	torn[40] ^= 1
	for name, bad := range map[string][]byte{
		"nonce": message(k.Index, forged.Record(want)), "slot": message(1<<20, k.Record(want)), "other slot": message(k.Index+1, k.Record(want)),
		"torn": torn, "short": good[:len(good)-1], "long": append(good[:len(good):len(good)], 0), "empty": nil,
	} {
		if err := b.CompleteMessage(bad); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if err := b.CompleteMessage(good); err != nil || len(heard) != 1 || heard[0].t != k || heard[0].c != want {
		t.Errorf("%v, notified of %+v", err, heard)
	}
	if err := b.CompleteMessage(good); !errors.Is(err, ErrLate) {
		t.Errorf("the same again: %v, want ErrLate", err)
	}
	if n := b.Refused(); n != 8 {
		t.Errorf("%d refused, want 8", n)
	}
}

// A tier that opens agents again and again keeps no board of those before.
func TestRealBoardsOfEndedAgents(t *testing.T) {
	mapped := func() int {
		b := must[[]byte](t)(os.ReadFile("/proc/self/maps"))
		return strings.Count(string(b), "memfd:sluice-board")
	}
	before := mapped()
	search := realNIXL(t)
	var last *CompletionBoard
	var completionSlot CompletionSlot
	for range 8 {
		a := must[*Agent](t)(Open(t.Context(), Config{Name: "again", Search: search}))
		last = must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), a, 128, nil))
		completionSlot, _ = last.Acquire(7, time.Now().Add(time.Minute))
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	testwait.Until(t, "the boards' memory to go back", func() bool { runtime.GC(); return mapped() <= before+1 })
	if _, state := last.Poll(completionSlot); state != Pending {
		t.Errorf("a completion slot of the last one is %v; want pending: its holder still has it", state)
	}
	last.Release(completionSlot)
}
