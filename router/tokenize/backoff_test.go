package tokenize

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/dataplane/upstream"
)

// clock is a hand-moved clock.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	c.t = c.t.Add(d)
	c.mu.Unlock()
}

func newBackoffs(opt Options) (*backoffs, *clock) {
	opt.defaults()
	c := &clock{t: time.Unix(1e9, 0)}
	f := &backoffs{now: c.now, opt: new(atomic.Pointer[Options])}
	f.opt.Store(&opt)
	return f, c
}

var errTimedOut = fmt.Errorf("slow: %w", upstream.ErrTimeout)

func TestBackoffGrowsAndEnds(t *testing.T) {
	f, c := newBackoffs(Options{})
	may := func() bool { _, ok := f.allow("u", 10); return ok }
	if !may() || f.isActive("u") {
		t.Fatal("an engine without trouble is not asked")
	}
	want := []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second, 30 * time.Second}
	for i, rest := range want {
		c.advance(time.Millisecond)
		f.recordFailure("u", 10, c.now(), errTimedOut)
		if why, ok := f.allow("u", 10); ok || !strings.Contains(why, "slow") || !f.isActive("u") {
			t.Fatalf("failure %d: asked %v, why %q", i, ok, why)
		}
		c.advance(rest - time.Nanosecond)
		if may() {
			t.Fatalf("failure %d: asked before %v were over", i, rest)
		}
		c.advance(time.Nanosecond)
		if f.isActive("u") || !may() {
			t.Fatalf("failure %d: not asked after %v", i, rest)
		}
		if may() {
			t.Fatalf("failure %d: two go ahead at once", i)
		}
	}
	if _, ok := f.allow("other", 10); !ok {
		t.Error("another engine is not asked")
	}
	f.recordSuccess("u", 10)
	if !may() || f.count.Load() != 0 {
		t.Error("an engine that answered is still in trouble")
	}
}

// If the one that went ahead never reports (its client left), another goes.
func TestALostProbeIsReplaced(t *testing.T) {
	f, c := newBackoffs(Options{Timeout: time.Second})
	f.recordFailure("u", 10, c.now(), errBusy)
	c.advance(minDelay)
	_, first := f.allow("u", 10)
	c.advance(2 * time.Second)
	if _, second := f.allow("u", 10); !first || !second {
		t.Error(first, second)
	}
}

func TestRequestsThatFailTogetherCountOnce(t *testing.T) {
	f, c := newBackoffs(Options{})
	began := c.now()
	c.advance(250 * time.Millisecond)
	for range 100 {
		f.recordFailure("u", 10, began, errTimedOut)
	}
	c.advance(minDelay)
	if _, ok := f.allow("u", 10); !ok {
		t.Error("a hundred failures at once count as more than one")
	}
}

func TestUnsupportedIsRememberedAWhile(t *testing.T) {
	f, c := newBackoffs(Options{})
	f.recordFailure("u", 10, c.now(), errUnsupported)
	c.advance(30*time.Second - 1)
	if _, ok := f.allow("u", 10); ok {
		t.Error("asked before its time")
	}
	c.advance(1)
	if _, ok := f.allow("u", 10); !ok {
		t.Error("never asked again")
	}
}

func TestLongPromptDoesNotBlockShortOnes(t *testing.T) {
	f, c := newBackoffs(Options{})
	long := 4 * shortPrompt
	may := func(size int) bool { _, ok := f.allow("u", size); return ok }
	f.recordFailure("u", long, c.now(), errTimedOut)
	if !may(1000) || !may(long/2-1) || may(long/2) || may(long) || f.isActive("u") {
		t.Error("after a timeout on a long prompt")
	}
	f.recordSuccess("u", 1000) // a short one says nothing of long ones
	if may(long) {
		t.Error("a short answer brought long prompts back")
	}
	c.advance(time.Millisecond)
	f.recordFailure("u", 1000, c.now(), errTimedOut)
	if may(1000) || !f.isActive("u") {
		t.Error("after a timeout on a short prompt too")
	}
}

func TestErrorsWithoutBackoff(t *testing.T) {
	f, c := newBackoffs(Options{})
	f.recordFailure("u", 10, c.now(), &engineError{cause: errRefused})
	f.recordFailure("u", 10, c.now(), &upstream.Error{Err: upstream.ErrTooManyConns})
	if _, ok := f.allow("u", 10); !ok || f.count.Load() != 0 {
		t.Error("the engine rests")
	}
	f.recordFailure("u", 10, c.now(), errBusy)
	f.recordFailure("u", 10, c.now(), errRefused)
	if _, ok := f.allow("u", 10); !ok {
		t.Error("an engine that answers with a refusal is well")
	}
}

func TestBackoffExpires(t *testing.T) {
	f, c := newBackoffs(Options{})
	for i := range 1000 {
		f.recordFailure(fmt.Sprint("http://gone-", i), 10, c.now(), errBusy)
		c.advance(time.Minute)
	}
	if n := len(f.byURL); n > 10 || n == 0 || int(f.count.Load()) != n {
		t.Errorf("%d engines remembered, %d counted", n, f.count.Load())
	}
}

// A stalled engine delays one request by the timeout, the next ones not at
// all, until it is tried again and has recovered.
func TestAStalledEngine(t *testing.T) {
	e := newEngine(t)
	hold := make(chan struct{})
	e.set(0, "", hold)
	tk := New(Options{Timeout: 100 * time.Millisecond})
	c := &clock{t: time.Unix(1e9, 0)}
	// The fault's clock stands still but for the timeout itself.
	tk.backoffs.now = func() time.Time { c.advance(100 * time.Millisecond); return c.now() }
	p := find(t, tk, Completion, `{"prompt":"the first one waits"}`, e.ep)
	if p.Source != FromText || !strings.Contains(p.Err, e.URL) {
		t.Fatalf("%v %q", p.Source, p.Err)
	}
	tk.backoffs.now = c.now
	for i := range 50 {
		p = find(t, tk, Completion, fmt.Sprintf(`{"prompt":"%d does not"}`, i), e.ep)
		if p.Source != FromText || p.Err == "" {
			t.Fatalf("%v %q", p.Source, p.Err)
		}
	}
	if s := tk.Stats(); len(e.requests()) != 1 || s.Timeouts != 1 || s.Failed != 1 || s.BackedOff != 50 || tk.Available(e.ep) {
		t.Fatalf("%d calls, %+v", len(e.requests()), s)
	}
	e.set(0, "", nil)
	close(hold)
	c.advance(minDelay)
	tk.Reload(patient)
	if p = find(t, tk, Completion, `{"prompt":"well again"}`, e.ep); p.Source != FromEngine || !tk.Available(e.ep) {
		t.Errorf("%v %q", p.Source, p.Err)
	}
}

func TestNobodyListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	_ = l.Close()
	ep, err := upstream.NewEndpoint(url, upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	tk := New(patient)
	p := find(t, tk, Chat, `{"messages":[{}]}`, ep)
	if p.Source != FromText || !strings.Contains(p.Err, url) || tk.Available(ep) || tk.Available(nil) {
		t.Errorf("%v %q", p.Source, p.Err)
	}
}

func TestCancelIsNoFailure(t *testing.T) {
	e := newEngine(t)
	tk := New(patient)
	var call upstream.Call
	call.Cancel()
	var p Prompt
	tk.Prompt(&p, Completion, scanned(t, `{"prompt":"x"}`), e.ep, &call)
	if p.Source != FromText || !tk.Available(e.ep) || tk.Stats().Failed != 0 {
		t.Errorf("%v %q", p.Source, p.Err)
	}
}

func TestEngineError(t *testing.T) {
	err := error(&engineError{url: "http://e", status: 503, cause: errBusy})
	if err.Error() != `tokenize: cannot ask "http://e": it returned an error (status 503)` || !errors.Is(err, errBusy) {
		t.Error(err)
	}
}
