package tokenize

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
)

// backoffs remembers the engines whose tokenizer failed, by URL, so that a
// stalled one delays a request now and then and not every one. While nobody is
// in trouble it is empty, and asking it costs one atomic load.
type backoffs struct {
	now func() time.Time
	opt *atomic.Pointer[Options]

	count atomic.Int32
	mu    sync.Mutex
	byURL map[string]*backoff
}

// backoff is one engine's trouble.
type backoff struct {
	at    time.Time // of the last failure
	until time.Time // not asked before
	delay time.Duration
	// below: requests shorter than this are asked all the same. Not 0 after a
	// time-out on a long prompt, which says nothing of short ones.
	minSize int
	reason  string
}

const (
	minDelay = 500 * time.Millisecond
	// shortPrompt: an engine that takes too long over so few bytes is in trouble.
	shortPrompt = 64 << 10
	// forgetAfter: an engine that was in trouble and then not asked for so long
	// starts anew.
	forgetAfter = 5 * time.Minute
)

// allow says whether to send an engine a request of size bytes, else why not.
// When a rest is over one request goes ahead and the others wait for its end.
func (f *backoffs) allow(url string, size int) (reason string, ok bool) {
	if f.count.Load() == 0 {
		return "", true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.byURL[url]
	if x == nil || size < x.minSize {
		return "", true
	}
	now := f.now()
	if now.Before(x.until) {
		return x.reason, false
	}
	x.until = now.Add(2 * f.opt.Load().Timeout)
	return "", true
}

// isActive is allow for a short request without taking its turn.
func (f *backoffs) isActive(url string) bool {
	if f.count.Load() == 0 {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.byURL[url]
	return x != nil && x.minSize == 0 && f.now().Before(x.until)
}

// recordSuccess notes that an engine answered a request of size bytes.
func (f *backoffs) recordSuccess(url string, size int) {
	if f.count.Load() == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if x := f.byURL[url]; x != nil && size >= x.minSize {
		delete(f.byURL, url)
		f.count.Store(int32(len(f.byURL)))
	}
}

// recordFailure notes that a request of size bytes, sent at began, failed with err.
func (f *backoffs) recordFailure(url string, size int, began time.Time, err error) {
	switch {
	case errors.Is(err, errRefused): // says something of the prompt; the engine is well
		f.recordSuccess(url, size)
		return
	case errors.Is(err, upstream.ErrTooManyConns), errors.Is(err, upstream.ErrLocalResources): // our own bounds
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.now()
	if f.byURL == nil {
		f.byURL = make(map[string]*backoff)
	}
	for u, x := range f.byURL {
		if now.Sub(x.until) > forgetAfter {
			delete(f.byURL, u)
		}
	}
	x := f.byURL[url]
	if x == nil {
		x = &backoff{minSize: size}
		f.byURL[url] = x
		f.count.Store(int32(len(f.byURL)))
	}
	below := 0
	if timedOut(err) && size > shortPrompt {
		below = size / 2
	}
	x.minSize = min(x.minSize, below)
	x.reason = err.Error()
	switch {
	case errors.Is(err, errUnsupported):
		x.delay = f.opt.Load().UnsupportedFor
	case x.delay == 0:
		x.delay = minDelay
	case began.After(x.at): // requests that failed together count once
		x.delay = min(2*x.delay, f.opt.Load().MaxBackoff)
	}
	x.at, x.until = now, now.Add(x.delay)
}
