package tokenize

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
)

// faults remembers the engines whose tokenizer failed, by URL, so that a
// stalled one delays a request now and then and not every one. While nobody is
// in trouble it is empty, and asking it costs one atomic load.
type faults struct {
	now func() time.Time
	opt *atomic.Pointer[Options]

	troubled atomic.Int32
	mu       sync.Mutex
	byURL    map[string]*fault
}

// fault is one engine's trouble.
type fault struct {
	at    time.Time // of the last failure
	until time.Time // not asked before
	rest  time.Duration
	// below: requests shorter than this are asked all the same. Not 0 after a
	// time-out on a long prompt, which says nothing of short ones.
	below int
	why   string
}

const (
	firstRest = 500 * time.Millisecond
	// shortPrompt: an engine that takes too long over so few bytes is in trouble.
	shortPrompt = 64 << 10
	// forgetAfter: an engine that was in trouble and then not asked for so long
	// starts anew.
	forgetAfter = 5 * time.Minute
)

// mayAsk says whether to send an engine a request of size bytes, else why not.
// When a rest is over one request goes ahead and the others wait for its end.
func (f *faults) mayAsk(url string, size int) (why string, ok bool) {
	if f.troubled.Load() == 0 {
		return "", true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.byURL[url]
	if x == nil || size < x.below {
		return "", true
	}
	now := f.now()
	if now.Before(x.until) {
		return x.why, false
	}
	x.until = now.Add(2 * f.opt.Load().Timeout)
	return "", true
}

// resting is mayAsk for a short request without taking its turn.
func (f *faults) resting(url string) bool {
	if f.troubled.Load() == 0 {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.byURL[url]
	return x != nil && x.below == 0 && f.now().Before(x.until)
}

// clear notes that an engine answered a request of size bytes.
func (f *faults) clear(url string, size int) {
	if f.troubled.Load() == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if x := f.byURL[url]; x != nil && size >= x.below {
		delete(f.byURL, url)
		f.troubled.Store(int32(len(f.byURL)))
	}
}

// add notes that a request of size bytes, sent at began, failed with err.
func (f *faults) add(url string, size int, began time.Time, err error) {
	switch {
	case errors.Is(err, errRefused): // says something of the prompt; the engine is well
		f.clear(url, size)
		return
	case errors.Is(err, upstream.ErrTooManyConns), errors.Is(err, upstream.ErrWanting): // our own bounds
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.now()
	if f.byURL == nil {
		f.byURL = make(map[string]*fault)
	}
	for u, x := range f.byURL {
		if now.Sub(x.until) > forgetAfter {
			delete(f.byURL, u)
		}
	}
	x := f.byURL[url]
	if x == nil {
		x = &fault{below: size}
		f.byURL[url] = x
		f.troubled.Store(int32(len(f.byURL)))
	}
	below := 0
	if timedOut(err) && size > shortPrompt {
		below = size / 2
	}
	x.below = min(x.below, below)
	x.why = err.Error()
	switch {
	case errors.Is(err, errUnsupported):
		x.rest = f.opt.Load().UnsupportedFor
	case x.rest == 0:
		x.rest = firstRest
	case began.After(x.at): // requests that failed together count once
		x.rest = min(2*x.rest, f.opt.Load().MaxBackoff)
	}
	x.at, x.until = now, now.Add(x.rest)
}
