package eventloop

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// The threads that run goroutines sleep as long as they mean to once there are loops. Not
// all: some may have been busy then.
func TestSleepsAreShort(t *testing.T) {
	s, err := Start(Options{Loops: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const n = 4
	var short atomic.Int32
	var arrived, over sync.WaitGroup
	arrived.Add(n)
	for range n {
		over.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			ns, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
			if err != nil {
				t.Error(err)
			}
			if ns == 1 {
				short.Add(1)
			}
			arrived.Done()
			arrived.Wait() // each on a thread of its own
		})
	}
	over.Wait()
	if short.Load() < n/2 {
		t.Errorf("%d of %d threads sleep no longer than they mean to", short.Load(), n)
	}
}
