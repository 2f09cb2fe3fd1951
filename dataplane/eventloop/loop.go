package eventloop

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
	"sluice/dataplane/rawsocket"
)

// pollMode is how a loop waits.
type pollMode int

const (
	// pollImmediate: the loop does not wait, because there is other work.
	pollImmediate pollMode = iota
	// pollBrief: the loop waits for at most pollBriefWait without informing Go's scheduler.
	// Informing it would cost the thread its P, which it must find again when bytes come, and would
	// wake and keep awake the runtime's monitor, which then runs every 20 µs: half of the cost of
	// an event. The price is an idle P: one is added for each thread that waits so, and removed
	// when the thread has been quiet for releaseProcAfter. A stop of the world interrupts the wait
	// by a signal.
	pollBrief
	// pollBlocking: the loop waits as any Go program does. For a loop that has been quiet for a
	// while.
	pollBlocking
)

// maxOutbox bounds how many streams are read before the first is written, and so how much later the
// first gets its bytes.
const maxOutbox = 32

const (
	// smallRead is how much is read at a time without checking that Out has space for it. What Out
	// does not accept is copied to memory until it has been sent. Events are smaller. Larger data
	// is read as Out has space for it, which is checked until roomCheckReads reads in a row have
	// found space.
	smallRead      = 4 << 10
	roomCheckReads = 255

	pollBriefWait = 10 // ms
	// deadlineSlack is the least time between two checks of deadlines, because each check visits
	// all tasks.
	deadlineSlack = 20 * time.Millisecond
	// starvedAfter is how late a check must be before the delay is added to the tasks' timeouts.
	starvedAfter = time.Second
	// pollBriefFor is how long after the last bytes a loop waits by pollBrief.
	pollBriefFor = 100 * time.Millisecond
	// releaseProcAfter is how long after the last bytes the thread's P is removed. Adding or
	// removing a P stops the world. A P that no thread holds costs each request a switch between
	// two threads that share a core.
	releaseProcAfter = 10 * time.Second
)

// Loop is one thread and its streams.
type Loop struct {
	poll *epoll
	tick time.Duration

	mu      sync.Mutex
	inbox   []*Task // attached or cancelled tasks
	stopped bool    // accepts no more tasks
	ended   bool    // the thread has ended
	load    int     // number of tasks, for the choice in Attach

	// Used by the thread only.
	drained   []*Task // the inbox that is being drained
	tasks     []*Task // by slot
	free      []uint32
	gens      []uint32
	count     int
	readAgain []*Task
	outbox    []pendingWrite
	flushers  []Flusher // of Sinks
	now       time.Time
	lastIn    time.Time
	nextCheck time.Time // the time of the next check
	timer     *time.Timer
	procAdded bool // a P has been added for the thread
	current   *Task
	done      chan struct{}
	onFail    func(error)
	onStarved func(time.Duration)
	budget    *membudget.Budget
	batch     int // events of the last turn
	overload  overload
}

func newLoop(opt *Options) *Loop {
	l := &Loop{tick: opt.Tick, done: make(chan struct{}), onFail: opt.OnFail, onStarved: opt.OnStarved, budget: opt.Budget}
	l.timer = time.AfterFunc(time.Hour, l.wakeUp)
	l.timer.Stop()
	return l
}

func (l *Loop) wakeUp() {
	l.mu.Lock()
	if !l.ended {
		l.poll.wake()
	}
	l.mu.Unlock()
}

// admit passes t to the thread; false: the thread has ended. The loop becomes t's under the lock,
// so that a concurrent Cancel is queued after it. Otherwise the task would be ended twice: by
// shutdown and by Cancel.
func (l *Loop) admit(t *Task) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return false
	}
	t.loop.Store(l)
	l.load++
	l.enqueue(t)
	return true
}

// notifyCancelled tells the thread that t was cancelled, unless the thread has ended.
func (l *Loop) notifyCancelled(t *Task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		l.enqueue(t)
	}
}

// enqueue puts t into the inbox. l.mu is held, under which the poller is closed too.
func (l *Loop) enqueue(t *Task) {
	l.inbox = append(l.inbox, t)
	if len(l.inbox) == 1 {
		l.poll.wake()
	}
}

// stop makes the thread end its tasks and itself.
func (l *Loop) stop() {
	l.mu.Lock()
	l.stopped = true
	l.mu.Unlock()
	l.wakeUp()
}

// run is the thread. The thread stays locked and ends with run.
func (l *Loop) run(opened chan<- error) {
	runtime.LockOSThread()
	var err error
	l.poll, err = openEpoll(l)
	opened <- err
	if err != nil {
		return
	}
	defer close(l.done)
	l.now = time.Now()
	for !l.turn() {
	}
}

// shutdown detaches every remaining task when the thread ends, whatever the kernel reports, because
// the poller is closed.
func (l *Loop) shutdown() {
	l.timer.Stop()
	if l.procAdded {
		l.procAdded = false
		procs.add(-1)
	}
	l.mu.Lock()
	l.ended = true
	l.poll.close()
	l.drained = append(l.drained, l.inbox...)
	l.inbox = nil
	l.mu.Unlock()
	for _, t := range l.tasks {
		if t != nil {
			l.releaseTask(t, Cancelled, nil)
		}
	}
	for _, t := range l.drained {
		if !t.attached {
			t.attached = true
			l.decLoad()
			t.Handler.Ended(End{Reason: Cancelled})
		}
	}
}

// turn handles the queued work and waits for more; true: the loop has ended. A Handler that panics
// ends its own stream only. The rest of the queue is handled by the next turn.
func (l *Loop) turn() (ended bool) {
	defer func() {
		if v := recover(); v != nil {
			t := l.current
			if t == nil || t.state != taskAttached {
				panic(v) // not from a Handler
			}
			l.endTask(t, Panicked, fmt.Errorf("%v\n%s", v, debug.Stack()))
		}
	}()
	for l.batch = 0; l.poll.next(); l.batch++ {
		if len(l.outbox) == maxOutbox {
			l.flush()
		}
	}
	l.flush()
	l.resumeReads()
	l.flush()
	if l.drainInbox() && l.count == 0 {
		l.shutdown()
		return true
	}
	if l.count > 0 && !l.now.Before(l.nextCheck) {
		l.check()
	}
	h := l.pollMode()
	l.adjustProcs(h)
	if err := l.wait(h); err != nil {
		l.onFail(err)
		l.shutdown()
		return true
	}
	return false
}

// wait waits for events by h. A loop that is behind pauses instead.
func (l *Loop) wait(h pollMode) error {
	if h != pollImmediate && l.batch >= behindBatch {
		err := l.poll.wait(pollImmediate)
		l.now = time.Now()
		if err != nil {
			return err
		}
		if l.poll.ready() {
			if d := l.overload.pause(l.now, l.count); d > 0 {
				l.poll.pause(d)
				l.now = time.Now()
				l.overload.begin(l.now)
			}
			return nil
		}
	}
	if h != pollImmediate {
		l.overload.reset()
	}
	err := l.poll.wait(h)
	l.now = time.Now()
	return err
}

// pollMode returns how to wait now. Whether there are tasks does not matter: with short streams
// there are often none between two, and a loop that blocked then would have the monitor woken for
// each stream.
func (l *Loop) pollMode() pollMode {
	switch {
	case len(l.readAgain) > 0:
		return pollImmediate
	case l.now.Sub(l.lastIn) >= pollBriefFor:
		return pollBlocking
	}
	return pollBrief
}

// adjustProcs adds or removes the P that the thread holds during pollBrief.
func (l *Loop) adjustProcs(h pollMode) {
	quiet := l.now.Sub(l.lastIn)
	switch {
	case h == pollBrief && !l.procAdded:
		l.procAdded = true
		procs.add(1)
	case h != pollBlocking || !l.procAdded:
	case quiet >= releaseProcAfter:
		l.procAdded = false
		procs.add(-1)
	case l.count == 0: // nothing else would wake it
		l.timer.Reset(releaseProcAfter - quiet)
	}
}

// resumeReads reads again from the streams that have had more data than their share of a turn.
func (l *Loop) resumeReads() {
	for left := len(l.readAgain); left > 0; left-- {
		t := l.readAgain[0]
		l.readAgain = append(l.readAgain[:0], l.readAgain[1:]...)
		t.readAgain = false
		if t.state == taskAttached && !t.paused {
			if err := l.poll.watch(t); err != nil {
				l.endTask(t, ReadFailed, err)
			}
		}
	}
}

// drainInbox handles the inbox; true: the loop shall end.
func (l *Loop) drainInbox() (stopped bool) {
	l.mu.Lock()
	l.drained, l.inbox = l.inbox, l.drained[:0]
	stopped = l.stopped
	l.mu.Unlock()
	for i, t := range l.drained {
		l.drained[i] = nil
		switch {
		case !t.attached:
			l.startTask(t)
		case t.state == taskAttached && t.cancelled.Load():
			l.endTask(t, Cancelled, nil)
		}
	}
	l.drained = l.drained[:0]
	if stopped {
		for _, t := range l.tasks {
			if t != nil && t.state == taskAttached {
				l.endTask(t, Cancelled, nil)
			}
		}
	}
	return stopped
}

// startTask starts t.
func (l *Loop) startTask(t *Task) {
	if l.count == 0 {
		l.checkAt(l.now.Add(l.tick))
	}
	if deadline := t.deadline.Time(); t.deadline != 0 && deadline.Before(l.nextCheck) {
		l.checkAt(deadline)
	}
	if n := len(l.free); n > 0 {
		t.slot = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		t.slot = uint32(len(l.tasks))
		l.tasks = append(l.tasks, nil)
		l.gens = append(l.gens, 0)
	}
	l.gens[t.slot]++
	t.gen = l.gens[t.slot] & genMask
	l.tasks[t.slot] = t
	l.count++
	t.state, t.lastIn, t.attached = taskAttached, monotime.Of(l.now), true
	l.lastIn = l.now
	if t.cancelled.Load() {
		l.endTask(t, Cancelled, nil)
		return
	}
	if err := l.poll.watch(t); err != nil {
		l.endTask(t, ReadFailed, err)
	}
}

// genMask limits generations to the bits that the pollers' tags have.
const genMask = 1<<24 - 1

// find returns the task of a slot if its generation is still gen.
func (l *Loop) find(slot, gen uint32) *Task {
	if int(slot) >= len(l.tasks) {
		return nil
	}
	if t := l.tasks[slot]; t != nil && t.gen == gen {
		return t
	}
	return nil
}

// dispatch passes bytes to the Handler. Its output is written later, by flush: to read from many
// streams and then write to many is cheaper than to alternate, because either path through the
// kernel exceeds the processor's first-level cache. p stays unchanged until flush; if t is queued,
// the poller has flushed before it read.
func (l *Loop) dispatch(t *Task, p []byte) {
	t.lastIn, l.lastIn = monotime.Of(l.now), l.now
	l.overload.read(len(p))
	l.current = t
	out, done := t.Handler.Process(p, l.now)
	l.current = nil
	if len(out) > 0 || done {
		t.queued = true
		l.outbox = append(l.outbox, pendingWrite{t, out, done})
	}
}

// flush writes the output that dispatch has queued.
func (l *Loop) flush() {
	for i := range l.outbox {
		o, t := l.outbox[i], l.outbox[i].t
		if t == nil { // ended before a Sink panicked
			continue
		}
		l.outbox[i] = pendingWrite{}
		t.queued = false
		if t.state == taskAttached && len(o.p) > 0 {
			if l.send(t, o.p); t.NotifySent && t.state == taskAttached {
				if most := t.Handler.(SentObserver).Sent(); most > 0 {
					l.endWithin(t, most)
				}
			}
		}
		if o.done && t.state == taskAttached {
			l.endTask(t, Done, nil)
		}
	}
	l.outbox = l.outbox[:0]
	for i, f := range l.flushers {
		l.flushers[i] = nil
		f.Flush()
	}
	l.flushers = l.flushers[:0]
	l.poll.releaseBuffer()
}

// pendingWrite is the output of one Process.
type pendingWrite struct {
	t    *Task
	p    []byte
	done bool
}

// sendToSink passes p to t's Sink.
func (l *Loop) sendToSink(t *Task, p []byte) {
	l.current = t
	flusher, full, err := t.Sink.Send(p)
	l.current = nil
	t.sent += int64(len(p))
	if flusher != nil {
		l.flushers = append(l.flushers, flusher)
	}
	switch {
	case err != nil:
		l.endTask(t, SendFailed, err)
	case full:
		l.endTask(t, SinkFull, nil)
	}
}

// send writes p. What Out does not accept is held in memory, and nothing more is read until it has
// been sent. How much a slow client may have outstanding is bounded by the socket's own buffer,
// whose size is the owner's decision (SO_SNDBUF). So a slow stream costs little more memory than a
// fast one, whose reading pauses earlier (waitWritable).
func (l *Loop) send(t *Task, p []byte) {
	if t.Sink != nil {
		l.sendToSink(t, p)
		return
	}
	if t.unsent == nil {
		n, errno := t.sendSome(p)
		t.sent += int64(n)
		if errno != 0 {
			l.endTask(t, SendFailed, errno)
			return
		}
		if p = p[n:]; len(p) == 0 {
			return
		}
		if err := l.poll.watchOut(t, false); err != nil {
			l.endTask(t, SendFailed, err)
			return
		}
	}
	if !t.queueUnsent(p, monotime.Of(l.now), l.budget) {
		l.endTask(t, BudgetExhausted, nil)
		return
	}
	t.paused, t.roomChecks = true, roomCheckReads
}

// waitWritable pauses reading until Out accepts more. If In has no data there is nothing to wait
// for.
func (l *Loop) waitWritable(t *Task) {
	var one [1]byte
	switch n, errno := rawsocket.Peek(t.In, one[:]); {
	case errno == syscall.EAGAIN:
		return
	case errno != 0 || n == 0:
		l.onReadEnd(t, errno)
		return
	}
	t.unsent = &unsentState{stalledSince: monotime.Of(l.now), socketUnsent: -1}
	t.paused, t.roomChecks = true, roomCheckReads
	if err := l.poll.watchOut(t, true); err != nil {
		l.endTask(t, SendFailed, err)
	}
}

// onWritable continues with held bytes, then with reading.
func (l *Loop) onWritable(t *Task) {
	s := t.unsent
	if t.state != taskAttached || s == nil {
		return
	}
	if t.unsentBytes() > 0 {
		n, errno := t.sendSome(s.buf.B[s.off:])
		t.sent += int64(n)
		s.off += n
		if errno != 0 {
			l.endTask(t, SendFailed, errno)
			return
		}
		if n > 0 {
			s.socketUnsent = -1
		}
		if t.unsentBytes() > 0 {
			return // reported when Out accepts more
		}
	}
	t.releaseUnsent(l.budget)
	t.paused, t.lastIn = false, monotime.Of(l.now)
	if err := l.poll.watch(t); err != nil {
		l.endTask(t, ReadFailed, err)
	}
}

// onReadEnd handles the end of In.
func (l *Loop) onReadEnd(t *Task, errno syscall.Errno) {
	if t.state != taskAttached {
		return
	}
	if errno == 0 {
		l.endTask(t, ReadFailed, io.EOF)
		return
	}
	l.endTask(t, ReadFailed, errno)
}

// endTask ends t.
func (l *Loop) endTask(t *Task, why Reason, err error) {
	if t.queued { // the engine has ended the stream after these bytes
		l.flush()
		if t.state != taskAttached {
			return
		}
	}
	l.poll.remove(t)
	l.releaseTask(t, why, err)
}

// releaseTask detaches t, which the poller no longer has.
func (l *Loop) releaseTask(t *Task, why Reason, err error) {
	l.tasks[t.slot] = nil
	l.free = append(l.free, t.slot)
	l.count--
	t.state = taskDetached
	end := End{Reason: why, Err: err, Sent: t.sent}
	if s := t.unsent; s != nil {
		if t.unsent = nil; s.buf != nil {
			end.Unsent, end.budgeted, end.budget = s.buf, s.budgeted, l.budget
			end.Unsent.B = end.Unsent.B[s.off:]
		}
	}
	if l.count == 0 {
		l.timer.Stop()
	}
	l.decLoad()
	t.Handler.Ended(end)
}

func (l *Loop) decLoad() {
	l.mu.Lock()
	l.load--
	l.mu.Unlock()
}

// Release releases the unsent bytes, once.
func (e *End) Release() {
	membudget.Default.Put(e.Unsent)
	if e.budget != nil {
		e.budget.Release(e.budgeted)
	}
	e.Unsent, e.budgeted = nil, 0
}
