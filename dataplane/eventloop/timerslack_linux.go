package eventloop

import (
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// maxTimerSlackThreads bounds the threads that setTimerSlack makes sure of.
const maxTimerSlackThreads = 64

// setTimerSlack has Go's threads sleep no longer than they mean to.
//
// A goroutine that a loop's thread makes ready, such as the one that reads a client's next
// request when a stream has ended, lies in the queue of the P that the thread keeps while it
// waits in the kernel. The thread that takes it from there sleeps for 3 µs first
// (runtime.runqgrab), in case its owner is about to run it. By the kernel's default a sleep
// may take 50 µs more, so that wake-ups come together: PR_SET_TIMERSLACK, of a thread and of
// those that it starts.
//
// The scheduler uses threads that it has before it starts others: as many goroutines as there
// are threads, each on one of its own, meet all that have nothing else to do. The runtime's
// monitor is not among them, whose 20 µs are better 70.
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
			_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // ns; where it is refused, sleeps stay long
			arrived.Done()
			arrived.Wait()
		}()
	}
	over.Wait()
}
