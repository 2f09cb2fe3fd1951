package tokenize

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
)

// backoffs remembers the engines whose tokenizer failed, by URL, so that a stalled one delays a
// request occasionally and not every one. While no engine fails it is empty, and a check costs one
// atomic load.
type backoffs struct {
	now func() time.Time
	opt *atomic.Pointer[Options]

	count atomic.Int32
	mu    sync.Mutex
	byURL map[string]*engineBackoff
}

// engineBackoff is the state of one engine.
type engineBackoff struct {
	at    time.Time // time of the last failure
	until time.Time // no request is sent before
	delay time.Duration
	// minSize: shorter requests are sent nevertheless. It is not 0 after a timeout on a long
	// prompt, which says nothing about short ones.
	minSize int
	reason  string
}

const (
	minDelay = 500 * time.Millisecond
	// shortPrompt: an engine that times out on so few bytes is failing.
	shortPrompt = 64 << 10
	// forgetAfter: a failed engine without requests for this long starts afresh.
	forgetAfter = 5 * time.Minute
)

// allow reports whether to send an engine a request of size bytes, and otherwise the reason. When
// the back-off ends, one request goes ahead and the others wait for its result.
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

// isActive is allow for a short request, without counting as the one that goes ahead.
func (f *backoffs) isActive(url string) bool {
	if f.count.Load() == 0 {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.byURL[url]
	return x != nil && x.minSize == 0 && f.now().Before(x.until)
}

// recordSuccess records that an engine answered a request of size bytes.
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

// recordFailure records that a request of size bytes, sent at began, failed with err.
func (f *backoffs) recordFailure(url string, size int, began time.Time, err error) {
	switch {
	case errors.Is(err, errRefused): // says something about the prompt; the engine works
		f.recordSuccess(url, size)
		return
	case errors.Is(err, upstream.ErrTooManyConns), errors.Is(err, upstream.ErrLocalResources): // this router's own limits
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.now()
	if f.byURL == nil {
		f.byURL = make(map[string]*engineBackoff)
	}
	for u, x := range f.byURL {
		if now.Sub(x.until) > forgetAfter {
			delete(f.byURL, u)
		}
	}
	x := f.byURL[url]
	if x == nil {
		x = &engineBackoff{minSize: size}
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
