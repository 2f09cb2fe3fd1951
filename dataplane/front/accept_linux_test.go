package front

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/dataplane/epoll"
)

// A goroutine that never waits yields the only processor to a goroutine whose input has arrived.
// Without the yield Go polls for input only after 10 ms.
func TestYield(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var y yielder
	y.poll.Open()
	defer y.poll.Close()
	other, client := socketPair(t)
	defer other.Close()
	defer client.Close()
	most := 0
	for range 100 {
		came := make(chan struct{})
		go func() {
			defer close(came)
			var one [1]byte
			if _, err := other.Read(one[:]); err != nil {
				t.Error(err)
			}
		}()
		time.Sleep(2 * time.Millisecond) // it waits in the poller
		if _, err := client.Write([]byte{'a'}); err != nil {
			t.Fatal(err)
		}
		turns := 0
		for waiting := true; waiting; turns++ {
			y.yield()
			select {
			case <-came:
				waiting = false
			default:
			}
		}
		most = max(most, turns)
	}
	if most > 20 {
		t.Errorf("it gave way %d times before another had its turn", most)
	}
}

// After close a yield does not wait, and a yielder without an eventfd works.
func TestYieldEnds(t *testing.T) {
	var y yielder
	y.poll.Open()
	y.poll.Close()
	done := make(chan struct{})
	go func() {
		for range 2 * yieldEvery {
			y.yield()
		}
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatal("it waits after close")
	}
	var none epoll.Yielder // like a yielder that could not make an eventfd
	none.Yield()
	none.Close()
}

// A goroutine that yields still makes progress while others compute without end. Each of them
// keeps the processor for 10 ms, and without the slow-yield rule 300 connections were accepted
// in 12 s.
func TestYieldWithBusyProcessors(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var y yielder
	y.poll.Open()
	defer y.poll.Close()
	var over atomic.Bool
	var busy sync.WaitGroup
	for range 4 {
		busy.Go(func() {
			for !over.Load() {
			}
		})
	}
	began := time.Now()
	for range 300 {
		y.yield()
	}
	took := time.Since(began)
	over.Store(true)
	busy.Wait()
	t.Logf("300 times in %v", took.Round(time.Millisecond))
	if took > 3*time.Second {
		t.Errorf("it gave way 300 times in %v", took)
	}
}
