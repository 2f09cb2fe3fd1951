package front

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A goroutine that never waits leaves the only processor to one for which something has
// come, each time it gives way. Without, Go looks into its poller after 10 ms.
func TestGiveWay(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var y courtesy
	y.bell.hang()
	defer y.bell.close()
	other, client := linked(t)
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
			y.giveWay()
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

// What ends it ends a wait, too, and takes no descriptor along.
func TestGiveWayEnds(t *testing.T) {
	var y courtesy
	y.bell.hang()
	y.bell.close()
	done := make(chan struct{})
	go func() {
		for range 2 * inARow {
			y.giveWay()
		}
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatal("it waits after close")
	}
	var none bell // as where there is no eventfd
	none.hear()
	none.close()
}

// Who gives way has time of its own where others compute without end: each of them keeps
// the processor for 10 ms, so that 300 connections were accepted in 12 s.
func TestGiveWayWhereAllAreBusy(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var y courtesy
	y.bell.hang()
	defer y.bell.close()
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
		y.giveWay()
	}
	took := time.Since(began)
	over.Store(true)
	busy.Wait()
	t.Logf("300 times in %v", took.Round(time.Millisecond))
	if took > 3*time.Second {
		t.Errorf("it gave way 300 times in %v", took)
	}
}
