package loop

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

// haste says how a loop waits.
type haste int

const (
	// atOnce: not at all, there is other work.
	atOnce haste = iota
	// awake: for awakeWait at most, without a word to Go's scheduler. That would take
	// the thread's P away meanwhile, and have to find one when bytes come; and it is
	// what wakes and keeps awake the runtime's monitor, which runs every 20 µs then:
	// half of the cost of an event. In exchange a P is idle: one is added for each
	// thread that waits so, and taken away again once it has been quiet for restAfter. A
	// stop of the world ends the wait by its signal.
	awake
	// asleep: as every Go program waits. For a loop that has been quiet for a while.
	asleep
)

// maxOutbox bounds how many streams are read before the first is written to: how much
// later it gets its bytes.
const maxOutbox = 32

const (
	// smallRead is what is read at a time without a look at whether Out has room for it: what
	// it does not take is held in memory of ours until it has gone. Events are smaller. Of
	// what is larger the rest is read as Out has room, and for waryReads reads behind one
	// for which it had none everything is.
	smallRead = 4 << 10
	waryReads = 255

	awakeWait = 10 // ms
	// untilSlack is how far apart at least the looks for tasks' Until are: each is at all
	// tasks, however many end within it.
	untilSlack = 20 * time.Millisecond
	// heldUpBy is how much later than it should have been a loop's look at its tasks is to
	// be before they are granted that time.
	heldUpBy = time.Second
	// awakeFor is how long after the last bytes a loop waits awake.
	awakeFor = 100 * time.Millisecond
	// restAfter is how long after the last bytes its thread's P is taken away. To add or
	// take one stops the world; to have one that no thread holds costs each request a
	// switch between two threads of Go's that share a core.
	restAfter = 10 * time.Second
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
	taken   []*Task // the inbox, being worked off
	tasks   []*Task // by slot
	free    []uint32
	gens    []uint32
	count   int
	again   []*Task
	outbox  []parcel
	due     []Flusher // of Sinks
	now     time.Time
	lastIn  time.Time
	next    time.Time // of check
	timer   *time.Timer
	added   bool // a P, for the thread
	current *Task
	done    chan struct{}
	onFail  func(error)
	onHeld  func(time.Duration)
	budget  *membudget.Budget
}

func newLoop(opt *Options) *Loop {
	l := &Loop{tick: opt.Tick, done: make(chan struct{}), onFail: opt.OnFail, onHeld: opt.OnHeldUp, budget: opt.Budget}
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
	l.put(t)
	return true
}

// post tells the thread that t was cut, unless it has ended.
func (l *Loop) post(t *Task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		l.put(t)
	}
}

// put puts t into the inbox. Called with mu, under which the poller is closed too.
func (l *Loop) put(t *Task) {
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

// end is the thread's last act. Every task still here is given back, whatever the
// kernel says: its poller is closed.
func (l *Loop) end() {
	l.timer.Stop()
	if l.added {
		l.added = false
		processors.add(-1)
	}
	l.mu.Lock()
	l.ended = true
	l.poll.close()
	l.taken = append(l.taken, l.inbox...)
	l.inbox = nil
	l.mu.Unlock()
	for _, t := range l.tasks {
		if t != nil {
			l.giveBack(t, WasCut, nil)
		}
	}
	for _, t := range l.taken {
		if !t.attached {
			t.attached = true
			l.unload()
			t.Handler.Left(End{Why: WasCut})
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
			if t == nil || t.state != inside {
				panic(v) // not a Handler's
			}
			l.leave(t, Panicked, fmt.Errorf("%v\n%s", v, debug.Stack()))
		}
	}()
	for l.poll.next() {
		if len(l.outbox) == maxOutbox {
			l.flush()
		}
	}
	l.flush()
	l.readOn()
	l.flush()
	if l.takeIn() && l.count == 0 {
		l.end()
		return true
	}
	if l.count > 0 && !l.now.Before(l.next) {
		l.check()
	}
	h := l.haste()
	l.provide(h)
	if err := l.poll.wait(h); err != nil {
		l.onFail(err)
		l.end()
		return true
	}
	l.now = time.Now()
	return false
}

// haste is how to wait now. It does not matter whether there are tasks: where streams
// are short there are none between two, and a loop that slept then would have the monitor
// woken for each of them.
func (l *Loop) haste() haste {
	switch {
	case len(l.again) > 0:
		return atOnce
	case l.now.Sub(l.lastIn) >= awakeFor:
		return asleep
	}
	return awake
}

// provide sees to the P that the thread holds while it waits awake.
func (l *Loop) provide(h haste) {
	quiet := l.now.Sub(l.lastIn)
	switch {
	case h == awake && !l.added:
		l.added = true
		processors.add(1)
	case h != asleep || !l.added:
	case quiet >= restAfter:
		l.added = false
		processors.add(-1)
	case l.count == 0: // nothing else would wake it
		l.timer.Reset(restAfter - quiet)
	}
}

// readOn reads once more from those that had more than their turn's share.
func (l *Loop) readOn() {
	for left := len(l.again); left > 0; left-- {
		t := l.again[0]
		l.again = append(l.again[:0], l.again[1:]...)
		t.again = false
		if t.state == inside && !t.paused {
			if err := l.poll.watch(t); err != nil {
				l.leave(t, ReadFailed, err)
			}
		}
	}
}

// takeIn works the inbox off; true when the loop is to end.
func (l *Loop) takeIn() (stopped bool) {
	l.mu.Lock()
	l.taken, l.inbox = l.inbox, l.taken[:0]
	stopped = l.stopped
	l.mu.Unlock()
	for i, t := range l.taken {
		l.taken[i] = nil
		switch {
		case !t.attached:
			l.enter(t)
		case t.state == inside && t.cut.Load():
			l.leave(t, WasCut, nil)
		}
	}
	l.taken = l.taken[:0]
	if stopped {
		for _, t := range l.tasks {
			if t != nil && t.state == inside {
				l.leave(t, WasCut, nil)
			}
		}
	}
	return stopped
}

// enter begins with t.
func (l *Loop) enter(t *Task) {
	if l.count == 0 {
		l.checkAt(l.now.Add(l.tick))
	}
	if until := epoch.Add(time.Duration(t.until)); t.until != 0 && until.Before(l.next) {
		l.checkAt(until)
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
	t.state, t.lastIn, t.attached = inside, at(l.now), true
	l.lastIn = l.now
	if t.cut.Load() {
		l.leave(t, WasCut, nil)
		return
	}
	if err := l.poll.watch(t); err != nil {
		l.leave(t, ReadFailed, err)
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

// took hands on what was read. What goes to Out is not written yet, but by flush: to
// read from many streams, then to write to many, is cheaper than to take turns, since
// either way through the kernel is longer than the processor's nearest cache. p stays
// as it is until flushed; where t is queued, the poller has flushed before it read.
func (l *Loop) took(t *Task, p []byte) {
	t.lastIn, l.lastIn = at(l.now), l.now
	l.current = t
	out, done := t.Handler.Take(p, l.now)
	l.current = nil
	if len(out) > 0 || done {
		t.queued = true
		l.outbox = append(l.outbox, parcel{t, out, done})
	}
}

// flush writes what took has put aside.
func (l *Loop) flush() {
	for i := range l.outbox {
		o, t := l.outbox[i], l.outbox[i].t
		if t == nil { // done before a Sink panicked
			continue
		}
		l.outbox[i] = parcel{}
		t.queued = false
		if t.state == inside && len(o.p) > 0 {
			if l.pass(t, o.p); t.Tells && t.state == inside {
				if most := t.Handler.(Passer).Passed(); most > 0 {
					l.endWithin(t, most)
				}
			}
		}
		if o.done && t.state == inside {
			l.leave(t, Done, nil)
		}
	}
	l.outbox = l.outbox[:0]
	for i, f := range l.due {
		l.due[i] = nil
		f.Flush()
	}
	l.due = l.due[:0]
	l.poll.flushed()
}

// parcel is what one Take has given.
type parcel struct {
	t    *Task
	p    []byte
	done bool
}

// give has t's Sink take p.
func (l *Loop) give(t *Task, p []byte) {
	l.current = t
	due, full, err := t.Sink.Put(p)
	l.current = nil
	t.sent += int64(len(p))
	if due != nil {
		l.due = append(l.due, due)
	}
	switch {
	case err != nil:
		l.leave(t, SendFailed, err)
	case full:
		l.leave(t, Full, nil)
	}
}

// pass writes p. What Out does not take is held, and nothing more is read for it until
// that has gone: the socket's own buffer is what a client may be behind, and how much
// that is its owner says (SO_SNDBUF). So a slow stream costs little more than a swift one,
// whose reading stops before that (await).
func (l *Loop) pass(t *Task, p []byte) {
	if t.Sink != nil {
		l.give(t, p)
		return
	}
	if t.slow == nil {
		n, errno := t.sendSome(p)
		t.sent += int64(n)
		if errno != 0 {
			l.leave(t, SendFailed, errno)
			return
		}
		if p = p[n:]; len(p) == 0 {
			return
		}
		if err := l.poll.watchOut(t, false); err != nil {
			l.leave(t, SendFailed, err)
			return
		}
	}
	if !t.hold(p, at(l.now), l.budget) {
		l.leave(t, NoRoom, nil)
		return
	}
	t.paused, t.wary = true, waryReads
}

// await leaves what In has where it is until Out takes more. Where In has nothing there is
// nothing to wait for.
func (l *Loop) await(t *Task) {
	var one [1]byte
	switch n, errno := sock.Peek(t.In, one[:]); {
	case errno == syscall.EAGAIN:
		return
	case errno != 0 || n == 0:
		l.readEnded(t, errno)
		return
	}
	t.slow = &slow{blocked: at(l.now), unsent: -1}
	t.paused, t.wary = true, waryReads
	if err := l.poll.watchOut(t, true); err != nil {
		l.leave(t, SendFailed, err)
	}
}

// writable goes on with what is held, and then with reading.
func (l *Loop) writable(t *Task) {
	s := t.slow
	if t.state != inside || s == nil {
		return
	}
	if t.heldBytes() > 0 {
		n, errno := t.sendSome(s.held.B[s.from:])
		t.sent += int64(n)
		s.from += n
		if errno != 0 {
			l.leave(t, SendFailed, errno)
			return
		}
		if n > 0 {
			s.unsent = -1
		}
		if t.heldBytes() > 0 {
			return // it is told when Out takes more
		}
	}
	t.drop(l.budget)
	t.paused, t.lastIn = false, at(l.now)
	if err := l.poll.watch(t); err != nil {
		l.leave(t, ReadFailed, err)
	}
}

// readEnded takes in that In gives nothing more.
func (l *Loop) readEnded(t *Task, errno syscall.Errno) {
	if t.state != inside {
		return
	}
	if errno == 0 {
		l.leave(t, ReadFailed, io.EOF)
		return
	}
	l.leave(t, ReadFailed, errno)
}

// leave ends t.
func (l *Loop) leave(t *Task, why Why, err error) {
	if t.queued { // by its engine's end, behind the bytes
		l.flush()
		if t.state != inside {
			return
		}
	}
	l.poll.forget(t)
	l.giveBack(t, why, err)
}

// giveBack lets go of t, of which the poller has.
func (l *Loop) giveBack(t *Task, why Why, err error) {
	l.tasks[t.slot] = nil
	l.free = append(l.free, t.slot)
	l.count--
	t.state = outside
	end := End{Why: why, Err: err, Sent: t.sent}
	if s := t.slow; s != nil {
		if t.slow = nil; s.held != nil {
			end.Held, end.counted, end.budget = s.held, s.counted, l.budget
			end.Held.B = end.Held.B[s.from:]
		}
	}
	if l.count == 0 {
		l.timer.Stop()
	}
	l.unload()
	t.Handler.Left(end)
}

func (l *Loop) unload() {
	l.mu.Lock()
	l.load--
	l.mu.Unlock()
}

// Release gives what is held back, once.
func (e *End) Release() {
	membudget.Default.Put(e.Held)
	if e.budget != nil {
		e.budget.Release(e.counted)
	}
	e.Held, e.counted = nil, 0
}
