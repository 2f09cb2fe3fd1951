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
	"sluice/dataplane/rawsocket"
)

// pollMode says how a loop waits.
type pollMode int

const (
	// pollImmediate: not at all, there is other work.
	pollImmediate pollMode = iota
	// awake: for pollBriefWait at most, without a word to Go's scheduler. That would take
	// the thread's P away meanwhile, and have to find one when bytes come; and it is
	// what wakes and keeps awake the runtime's monitor, which runs every 20 µs then:
	// half of the cost of an event. In exchange a P is idle: one is added for each
	// thread that waits so, and taken away again once it has been quiet for releaseProcAfter. A
	// stop of the world ends the wait by its signal.
	pollBrief
	// asleep: as every Go program waits. For a loop that has been quiet for a while.
	pollBlocking
)

// maxOutbox bounds how many streams are read before the first is written to: how much
// later it gets its bytes.
const maxOutbox = 32

const (
	// smallRead is what is read at a time without a look at whether Out has room for it: what
	// it does not take is held in memory of ours until it has gone. Events are smaller. Of
	// what is larger the rest is read as Out has room, and for roomCheckReads reads behind one
	// for which it had none everything is.
	smallRead      = 4 << 10
	roomCheckReads = 255

	pollBriefWait = 10 // ms
	// deadlineSlack is how far apart at least the looks for tasks' Until are: each is at all
	// tasks, however many end within it.
	deadlineSlack = 20 * time.Millisecond
	// starvedAfter is how much later than it should have been a loop's look at its tasks is to
	// be before they are granted that time.
	starvedAfter = time.Second
	// pollBriefFor is how long after the last bytes a loop waits awake.
	pollBriefFor = 100 * time.Millisecond
	// releaseProcAfter is how long after the last bytes its thread's P is taken away. To add or
	// take one stops the world; to have one that no thread holds costs each request a
	// switch between two threads of Go's that share a core.
	releaseProcAfter = 10 * time.Second
)

// Loop is one thread and its streams.
type Loop struct {
	poll *epoll
	tick time.Duration

	mu      sync.Mutex
	inbox   []*Task // attached or cut
	stopped bool    // no more tasks
	ended   bool    // the thread is over
	load    int     // tasks given to it, for Attach's choice

	// The thread's own.
	drained   []*Task // the inbox, being worked off
	tasks     []*Task // by slot
	free      []uint32
	gens      []uint32
	count     int
	readAgain []*Task
	outbox    []pendingWrite
	flushers  []Flusher // of Sinks
	now       time.Time
	lastIn    time.Time
	nextCheck time.Time // of check
	timer     *time.Timer
	procAdded bool // a P, for the thread
	current   *Task
	done      chan struct{}
	onFail    func(error)
	onStarved func(time.Duration)
	budget    *membudget.Budget
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

// admit gives t to the thread; false when that has ended. The loop becomes t's under
// the lock, so that a Cut meanwhile stands behind it in the inbox: a task that end
// found by its Cut alone would be told of its end twice.
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

// notifyCancelled tells the thread that t was cut, unless it has ended.
func (l *Loop) notifyCancelled(t *Task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		l.enqueue(t)
	}
}

// enqueue puts t into the inbox. Called with mu, under which the poller is closed too.
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

// run is the thread. It never gives its thread back: it ends with it.
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

// shutdown is the thread's last act. Every task still here is given back, whatever the
// kernel says: its poller is closed.
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

// turn does what there is to do and waits for more; true when the loop has ended. A
// Handler that panics costs its own stream only: what was queued is still done by the
// next turn.
func (l *Loop) turn() (ended bool) {
	defer func() {
		if v := recover(); v != nil {
			t := l.current
			if t == nil || t.state != taskAttached {
				panic(v) // not a Handler's
			}
			l.endTask(t, Panicked, fmt.Errorf("%v\n%s", v, debug.Stack()))
		}
	}()
	for l.poll.next() {
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
	if err := l.poll.wait(h); err != nil {
		l.onFail(err)
		l.shutdown()
		return true
	}
	l.now = time.Now()
	return false
}

// pollMode is how to wait now. It does not matter whether there are tasks: where streams
// are short there are none between two, and a loop that slept then would have the monitor
// woken for each of them.
func (l *Loop) pollMode() pollMode {
	switch {
	case len(l.readAgain) > 0:
		return pollImmediate
	case l.now.Sub(l.lastIn) >= pollBriefFor:
		return pollBlocking
	}
	return pollBrief
}

// adjustProcs sees to the P that the thread holds while it waits awake.
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

// resumeReads reads once more from those that had more than their turn's share.
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

// drainInbox works the inbox off; true when the loop is to end.
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

// startTask begins with t.
func (l *Loop) startTask(t *Task) {
	if l.count == 0 {
		l.checkAt(l.now.Add(l.tick))
	}
	if deadline := epoch.Add(time.Duration(t.deadline)); t.deadline != 0 && deadline.Before(l.nextCheck) {
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
	t.state, t.lastIn, t.attached = taskAttached, monoTimeOf(l.now), true
	l.lastIn = l.now
	if t.cancelled.Load() {
		l.endTask(t, Cancelled, nil)
		return
	}
	if err := l.poll.watch(t); err != nil {
		l.endTask(t, ReadFailed, err)
	}
}

// genMask keeps a generation small enough for the pollers' tags.
const genMask = 1<<24 - 1

// find gives the task of a slot that is still the same one.
func (l *Loop) find(slot, gen uint32) *Task {
	if int(slot) >= len(l.tasks) {
		return nil
	}
	if t := l.tasks[slot]; t != nil && t.gen == gen {
		return t
	}
	return nil
}

// dispatch hands on what was read. What goes to Out is not written yet, but by flush: to
// read from many streams, then to write to many, is cheaper than to take turns, since
// either way through the kernel is longer than the processor's nearest cache. p stays
// as it is until flushed; where t is queued, the poller has flushed before it read.
func (l *Loop) dispatch(t *Task, p []byte) {
	t.lastIn, l.lastIn = monoTimeOf(l.now), l.now
	l.current = t
	out, done := t.Handler.Process(p, l.now)
	l.current = nil
	if len(out) > 0 || done {
		t.queued = true
		l.outbox = append(l.outbox, pendingWrite{t, out, done})
	}
}

// flush writes what took has put aside.
func (l *Loop) flush() {
	for i := range l.outbox {
		o, t := l.outbox[i], l.outbox[i].t
		if t == nil { // done before a Sink panicked
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

// pendingWrite is what one Take has given.
type pendingWrite struct {
	t    *Task
	p    []byte
	done bool
}

// sendToSink has t's Sink take p.
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

// send writes p. What Out does not take is held, and nothing more is read for it until
// that has gone: the socket's own buffer is what a client may be behind, and how much
// that is its owner says (SO_SNDBUF). So a slow stream costs little more than a swift one,
// whose reading stops before that (await).
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
	if !t.queueUnsent(p, monoTimeOf(l.now), l.budget) {
		l.endTask(t, BudgetExhausted, nil)
		return
	}
	t.paused, t.roomChecks = true, roomCheckReads
}

// waitWritable leaves what In has where it is until Out takes more. Where In has nothing there is
// nothing to wait for.
func (l *Loop) waitWritable(t *Task) {
	var one [1]byte
	switch n, errno := rawsocket.Peek(t.In, one[:]); {
	case errno == syscall.EAGAIN:
		return
	case errno != 0 || n == 0:
		l.onReadEnd(t, errno)
		return
	}
	t.unsent = &unsentState{stalledSince: monoTimeOf(l.now), socketUnsent: -1}
	t.paused, t.roomChecks = true, roomCheckReads
	if err := l.poll.watchOut(t, true); err != nil {
		l.endTask(t, SendFailed, err)
	}
}

// onWritable goes on with what is held, and then with reading.
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
			return // it is told when Out takes more
		}
	}
	t.releaseUnsent(l.budget)
	t.paused, t.lastIn = false, monoTimeOf(l.now)
	if err := l.poll.watch(t); err != nil {
		l.endTask(t, ReadFailed, err)
	}
}

// onReadEnd takes in that In gives nothing more.
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
	if t.queued { // by its engine's end, behind the bytes
		l.flush()
		if t.state != taskAttached {
			return
		}
	}
	l.poll.remove(t)
	l.releaseTask(t, why, err)
}

// releaseTask lets go of t, of which the poller has.
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

// Release gives what is held back, once.
func (e *End) Release() {
	membudget.Default.Put(e.Unsent)
	if e.budget != nil {
		e.budget.Release(e.budgeted)
	}
	e.Unsent, e.budgeted = nil, 0
}
