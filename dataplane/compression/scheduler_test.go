package compression

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/membudget"
)

// swapScheduler has a test's own bounds in the place of the process's.
func swapScheduler(t *testing.T, own *scheduler) {
	was := decoding
	decoding = own
	t.Cleanup(func() { decoding = was })
}

// A request that finds too many before it, or waits too long, is refused; all slots are returned.
func TestDecodingIsBounded(t *testing.T) {
	own := newScheduler(1, 3, 50*time.Millisecond)
	swapScheduler(t, own)
	budget := membudget.NewBudget(64 << 20)
	src := gzipped(t, []byte("short"))
	decode := func() error {
		var room membudget.Lease
		defer room.Release()
		_, err := Gzip.Decode(src, &room, budget, 1<<20)
		return err
	}
	first, err := own.acquire()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := decode(); !errors.Is(err, ErrBusy) || time.Since(began) < 50*time.Millisecond {
		t.Errorf("beside a decoder that does not end: %v after %s", err, time.Since(began))
	}
	own.maxWait = 10 * time.Second
	waiters := make(chan error, 2)
	for range cap(waiters) {
		go func() { waiters <- decode() }()
	}
	testwait.Until(t, "two wait", func() bool { return own.waiting.Load() == 2 })
	began = time.Now()
	if err := decode(); !errors.Is(err, ErrBusy) || time.Since(began) > 5*time.Second {
		t.Errorf("beyond the bound: %v after %s", err, time.Since(began))
	}
	first.release()
	for range cap(waiters) {
		if err := <-waiters; err != nil {
			t.Errorf("who waited: %v", err)
		}
	}
	if own.pending.Load() != 0 || own.waiting.Load() != 0 || len(own.slots) != 0 || budget.Used() != 0 {
		t.Errorf("left over: %d in progress, %d waiting, %d turns, %d bytes", own.pending.Load(), own.waiting.Load(), len(own.slots), budget.Used())
	}
}

// A short body does not wait for a long one to end: its turn comes after a slice of it.
func TestShortDuringLong(t *testing.T) {
	own := newScheduler(1, 100, time.Minute)
	swapScheduler(t, own)
	budget := membudget.NewBudget(1 << 30)
	long := gzipped(t, []byte(strings.Repeat("a long body; ", 8<<20/13)))
	short := gzipped(t, []byte("short"))
	var all sync.WaitGroup
	shorts := 0
	first, err := own.acquire() // nobody decodes before all are in flight
	if err != nil {
		t.Fatal(err)
	}
	for range 4 { // each time a turn ends, who waits longest is next
		all.Add(1)
		go func() {
			defer all.Done()
			var room membudget.Lease
			defer room.Release()
			if _, err := Gzip.Decode(long, &room, budget, 16<<20); err != nil {
				t.Error(err)
			}
		}()
	}
	testwait.Until(t, "the long ones are in flight", func() bool { return own.waiting.Load() == 4 })
	first.release()
	for own.pending.Load() > 2 { // several are left
		var room membudget.Lease
		if _, err := Gzip.Decode(short, &room, budget, 16<<20); err != nil {
			t.Fatal(err)
		}
		room.Release()
		shorts++
	}
	all.Wait()
	if shorts < 3 {
		t.Errorf("%d short bodies were decoded while long ones were", shorts)
	}
}

// TestLargeBodiesShareMemory: many large bodies at once do not take the budget step by
// step until none of them finds enough. Bodies that were decoded hold their memory for a while.
func TestLargeBodiesShareMemory(t *testing.T) {
	own := newScheduler(1, 100, time.Minute)
	swapScheduler(t, own)
	const size, bodies = 8<<20 - 1, 24
	budget := membudget.NewBudget(bodies/4*size + bodies*largeOutput)
	text := []byte(strings.Repeat("x", size))
	sources := map[Algorithm][]byte{Gzip: gzipped(t, text), Zstd: zstded(t, text, window(maxWindow))}
	var all sync.WaitGroup
	for i := range bodies {
		all.Add(1)
		go func() {
			defer all.Done()
			var room membudget.Lease
			defer room.Release()
			c := []Algorithm{Gzip, Zstd}[i%2]
			if b, err := c.Decode(sources[c], &room, budget, size); err != nil || !bytes.Equal(b, text) {
				t.Errorf("body %d: %d bytes, %v", i, len(b), err)
			}
			testwait.Pace(5 * time.Millisecond) // an engine reads it
		}()
	}
	all.Wait()
	if own.pending.Load() != 0 || len(own.slots) != 0 || len(own.large) != 0 || budget.Used() != 0 {
		t.Errorf("left over: %d in progress, %d and %d turns, %d bytes", own.pending.Load(), len(own.slots), len(own.large), budget.Used())
	}
}

// A body for which no memory becomes free in time is refused, and so is one that waits for
// its turn behind it.
func TestWaitForMemoryIsBounded(t *testing.T) {
	own := newScheduler(1, 100, 50*time.Millisecond)
	swapScheduler(t, own)
	budget := membudget.NewBudget(16 << 20)
	if !budget.Acquire(14 << 20) {
		t.Fatal("no memory")
	}
	src := gzipped(t, []byte(strings.Repeat("x", 4<<20)))
	errs := make(chan error, 2)
	for range cap(errs) {
		go func() {
			var lease membudget.Lease
			_, err := Gzip.Decode(src, &lease, budget, 8<<20)
			lease.Release() // before the check of what is left
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; !errors.Is(err, ErrBudget) && !errors.Is(err, ErrBusy) {
			t.Errorf("%v, want a refusal for want of memory or turns", err)
		}
	}
	if own.pending.Load() != 0 || len(own.slots) != 0 || len(own.large) != 0 || budget.Used() != 14<<20 {
		t.Errorf("left over: %d in progress, %d and %d turns, %d bytes", own.pending.Load(), len(own.slots), len(own.large), budget.Used())
	}
}

// The memory of a decoder is counted while it decodes: one with a window of 8 MiB does not fit
// where 8 MiB are left.
func TestWindowsAreCounted(t *testing.T) {
	body := []byte(strings.Repeat("x", 100<<10))
	large, small := zstded(t, body, window(maxWindow)), zstded(t, body, window(1<<20))
	for _, c := range []struct {
		name   string
		src    []byte
		budget int64
		err    error
	}{
		{"a large window", large, maxWindow, ErrBudget},
		{"a large window with room", large, 2 * maxWindow, nil},
		{"a small window", small, maxWindow, nil},
		{"a large window in the second frame", append(small[:len(small):len(small)], large...), maxWindow, ErrBudget},
		{"a large window in the second frame, with room", append(small[:len(small):len(small)], large...), 2 * maxWindow, nil},
	} {
		budget := membudget.NewBudget(c.budget)
		var room membudget.Lease
		b, err := Zstd.Decode(c.src, &room, budget, 1<<20)
		if !errors.Is(err, c.err) || err == nil && len(b)%len(body) != 0 {
			t.Errorf("%s: %d bytes, %v; want %v", c.name, len(b), err, c.err)
		}
		room.Release()
		if budget.Used() != 0 {
			t.Errorf("%s: %d bytes were not given back", c.name, budget.Used())
		}
	}
}
