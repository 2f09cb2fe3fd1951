package tokenize

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
)

const flightBody = `{"model":"m","prompt":"the same prompt from many clients"}`

// start runs Prompt on its own goroutine and gives what it found when it ended.
func start(t *testing.T, tk *Tokenizer, ep *upstream.Endpoint, call *upstream.Call) <-chan *Prompt {
	t.Helper()
	doc := scanned(t, flightBody)
	done := make(chan *Prompt, 1)
	go func() {
		p := new(Prompt)
		tk.Prompt(p, Completion, doc, ep, call)
		done <- p
	}()
	return done
}

func await(t *testing.T, what string, c <-chan *Prompt) *Prompt {
	t.Helper()
	select {
	case p := <-c:
		return p
	case <-time.After(30 * time.Second):
		t.Fatal("never ended: " + what)
		return nil
	}
}

func TestSameLookupsAreOne(t *testing.T) {
	e := newEngine(t)
	hold := make(chan struct{})
	e.set(0, "", hold)
	tk := New(patient)
	const clients = 20
	var ends []<-chan *Prompt
	for range clients {
		ends = append(ends, start(t, tk, e.ep, new(upstream.Call)))
	}
	testwait.Until(t, "all but one wait", func() bool { return tk.Stats().Coalesced == clients-1 })
	close(hold)
	want := fmt.Sprint(idsOf(flightBody))
	bySource := map[Source]int{}
	for _, c := range ends {
		p := await(t, "a client", c)
		bySource[p.Source]++
		if fmt.Sprint(p.Tokens) != want {
			t.Errorf("tokens %v", p.Tokens)
		}
	}
	if bySource[FromEngine] != 1 || bySource[FromCache] != clients-1 || len(e.requests()) != 1 {
		t.Errorf("%v, %d calls", bySource, len(e.requests()))
	}
}

func TestFailureReachesAllWaiters(t *testing.T) {
	e := newEngine(t)
	hold := make(chan struct{})
	e.set(500, "oops", hold)
	tk := New(patient)
	a, b := start(t, tk, e.ep, nil), start(t, tk, e.ep, nil)
	testwait.Until(t, "one waits", func() bool { return tk.Stats().Coalesced == 1 })
	close(hold)
	for _, c := range []<-chan *Prompt{a, b} {
		if p := await(t, "a client", c); p.Source != FromText || p.Err == "" {
			t.Errorf("%v %q", p.Source, p.Err)
		}
	}
	if n := len(e.requests()); n != 1 {
		t.Errorf("%d calls", n)
	}
}

// The client of the one who asks leaves: another asks in its place, and the
// engine is not blamed.
func TestCancelledLeaderIsReplaced(t *testing.T) {
	e := newEngine(t)
	hold := make(chan struct{})
	e.set(0, "", hold)
	tk := New(patient)
	var first, second upstream.Call
	a := start(t, tk, e.ep, &first)
	testwait.Until(t, "the first asks", func() bool { return len(e.requests()) == 1 })
	b := start(t, tk, e.ep, &second)
	testwait.Until(t, "the second waits", func() bool { return tk.Stats().Coalesced == 1 })
	first.Cancel()
	if p := await(t, "the one that was cut", a); p.Source != FromText || p.Err == "" {
		t.Errorf("cut: %v %q", p.Source, p.Err)
	}
	testwait.Until(t, "the second asks", func() bool { return len(e.requests()) == 2 })
	close(hold)
	if p := await(t, "the second", b); p.Source != FromEngine {
		t.Errorf("second: %v %q", p.Source, p.Err)
	}
	if s := tk.Stats(); s.Failed != 0 || !tk.Available(e.ep) {
		t.Errorf("the engine was blamed: %+v", s)
	}
}

func TestCancelledWaiterReturns(t *testing.T) {
	e := newEngine(t)
	hold := make(chan struct{})
	e.set(0, "", hold)
	tk := New(patient)
	var call upstream.Call
	a := start(t, tk, e.ep, new(upstream.Call))
	testwait.Until(t, "the first asks", func() bool { return len(e.requests()) == 1 })
	b := start(t, tk, e.ep, &call)
	testwait.Until(t, "the second waits", func() bool { return tk.Stats().Coalesced == 1 })
	call.Cancel()
	if p := await(t, "the one that was cut", b); p.Source != FromText {
		t.Errorf("cut: %v", p.Source)
	}
	close(hold)
	if p := await(t, "the first", a); p.Source != FromEngine {
		t.Errorf("first: %v %q", p.Source, p.Err)
	}
}

func TestWaiterHasItsOwnTimeout(t *testing.T) {
	e := newEngine(t)
	tk := New(Options{Timeout: 50 * time.Millisecond})
	// A lookup in progress that no engine will ever end.
	doc := scanned(t, flightBody)
	w := getWork()
	w.read(Completion, doc)
	w.compose(doc)
	key := w.key()
	w.put()
	_, f, leads := tk.cache.get(key, true)
	if !leads {
		t.Fatal("another call already leads")
	}
	p := await(t, "the one who waits", start(t, tk, e.ep, nil))
	if p.Source != FromText || p.Err == "" {
		t.Errorf("%v %q", p.Source, p.Err)
	}
	tk.cache.finish(key, f)
}

// Many goroutines over few prompts, with cuts: for the race detector.
func TestConcurrentPrompts(t *testing.T) {
	e := newEngine(t)
	tk := New(Options{Timeout: patient.Timeout, CacheBytes: 16 * 1000})
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var p Prompt
			for i := range 60 {
				var call upstream.Call
				if (g+i)%7 == 0 {
					go call.Cancel()
				}
				body := fmt.Sprintf(`{"prompt":"prompt number %d, long enough"}`, (g*i)%11)
				tk.Prompt(&p, Completion, scanned(t, body), e.ep, &call)
				if want := idsOf(body); len(p.Tokens) > 0 && fmt.Sprint(p.Tokens) != fmt.Sprint(want) {
					t.Errorf("%s: %v, want %v", body, p.Tokens, want)
				}
				tk.Stats()
			}
		}()
	}
	wg.Wait()
	if s := tk.Stats(); s.FromCache == 0 || s.FromEngine == 0 || s.Failed != 0 || s.None != 0 {
		t.Errorf("%+v", s)
	}
}
