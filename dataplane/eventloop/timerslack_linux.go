package eventloop

import (
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// maxTimerSlackThreads bounds the threads whose timer slack setTimerSlack changes.
const maxTimerSlackThreads = 64

// setTimerSlack makes short sleeps of Go's threads exact.
//
// A goroutine that a loop's thread makes ready, such as the reader of a client's next request, is
// queued at the P that the thread keeps while it waits in the kernel. The thread that steals it
// sleeps for 3 µs first (runtime.runqgrab), in case the owner is about to run it. By default the
// kernel may extend a sleep by 50 µs to batch wake-ups (PR_SET_TIMERSLACK, per thread and
// inherited).
//
// The scheduler uses idle threads before it starts others. So as many goroutines as there are
// threads, each locked to one, reach all idle threads. The runtime's monitor is not among them; it
// profits from 70 µs in place of 20.
func setTimerSlack() {
	n, _ := runtime.ThreadCreateProfile(nil)
	n = min(n, maxTimerSlackThreads)
	var arrived, over sync.WaitGroup
	arrived.Add(n)
	over.Add(n)
	for range n {
		go func() {
			defer over.Done()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // in ns; where it is refused, sleeps stay long
			arrived.Done()
			arrived.Wait()
		}()
	}
	over.Wait()
}
