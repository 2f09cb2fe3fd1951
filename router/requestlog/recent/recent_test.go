package recent

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"sluice/router/requestlog"
)

// end passes one request through a log with only this ring.
func end(l *requestlog.Log, id string, out requestlog.Outcome, change func(*requestlog.Entry)) {
	e := l.Begin(requestlog.Request{ID: id})
	if change != nil {
		change(e)
	}
	e.Finish(out, 0)
}

func ids(r *Ring) (out []string) {
	for _, e := range r.Entries() {
		out = append(out, e.ID)
	}
	return out
}

// TestNotableRequestsStay: many good requests push out good ones, but not failed, slow and migrated
// ones; each is listed once, newest first.
func TestNotableRequestsStay(t *testing.T) {
	r := New(Options{Size: 3, Slow: time.Second})
	l := requestlog.New(r)
	end(l, "failed", requestlog.Outcome{Status: 502, Reason: "engine_down"}, nil)
	end(l, "slow", requestlog.Outcome{Status: 200, Total: time.Second}, nil)
	end(l, "migrated", requestlog.Outcome{Status: 200}, (*requestlog.Entry).AddMigration)
	if got, want := ids(r), []string{"migrated", "slow", "failed"}; !slices.Equal(got, want) {
		t.Errorf("kept %v, want %v", got, want)
	}
	for i := range 5 {
		end(l, fmt.Sprint("good-", i), requestlog.Outcome{Status: 200, Total: time.Second - 1}, nil)
	}
	if got, want := ids(r), []string{"good-4", "good-3", "good-2", "migrated", "slow", "failed"}; !slices.Equal(got, want) {
		t.Errorf("kept %v, want %v", got, want)
	}
	end(l, "cut", requestlog.Outcome{Status: 200, Reason: "client_gone"}, nil)
	if got, want := ids(r), []string{"cut", "good-4", "good-3", "migrated", "slow"}; !slices.Equal(got, want) {
		t.Errorf("kept %v, want %v", got, want)
	}
	if e := r.Find("slow"); e == nil || e.Total != time.Second {
		t.Errorf("found %+v, want the slow request", e)
	}
	if e := r.Find("good-0"); e != nil {
		t.Errorf("found %+v, which was pushed out", e)
	}
	if e := (*Ring)(nil).Find("slow"); e != nil {
		t.Errorf("a nil ring has %+v", e)
	}
}

// TestWants: of a busy second's requests only a bounded number is collected, the next second starts
// again, and a log with another sink collects all.
func TestWants(t *testing.T) {
	r := New(Options{Size: 1000})
	l := requestlog.New(r)
	collected := func(l *requestlog.Log, at time.Time) (n int) {
		for range 5 * maxPerSecond {
			if l.Wants(at) {
				n++
			}
		}
		return n
	}
	now := time.Unix(1_700_000_000, 0)
	if n := collected(l, now); n != maxPerSecond {
		t.Errorf("%d requests of one second are collected, want %d", n, maxPerSecond)
	}
	if n := collected(l, now.Add(time.Second)); n != maxPerSecond {
		t.Errorf("%d requests of the next second are collected, want %d", n, maxPerSecond)
	}
	if n := collected(requestlog.New(r, New(Options{})), now); n != 5*maxPerSecond {
		t.Errorf("%d requests are collected beside another sink, want all", n)
	}
}

// TestUnwantedRefusals: refusals beyond the bound allocate nothing and are not kept.
func TestUnwantedRefusals(t *testing.T) {
	r := New(Options{Size: 1000})
	l := requestlog.New(r)
	req := requestlog.Request{ID: "x", Model: "m", Received: time.Unix(1_700_000_000, 0)}
	for range maxPerSecond {
		l.Refused(req, requestlog.Outcome{Status: 401})
	}
	if n := testing.AllocsPerRun(100, func() { l.Refused(req, requestlog.Outcome{Status: 401}) }); n != 0 || len(r.Entries()) != maxPerSecond {
		t.Errorf("%v allocations a refusal, %d kept; want none, and %d", n, len(r.Entries()), maxPerSecond)
	}
	if l := (*requestlog.Log)(nil); l.Wants(time.Now()) {
		t.Error("a nil log wants a request")
	}
}

// TestConcurrentUse is for the race detector.
func TestConcurrentUse(t *testing.T) {
	r := New(Options{Size: 8})
	l := requestlog.New(r, New(Options{}))
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for i := range 200 {
				end(l, fmt.Sprint(g, "-", i), requestlog.Outcome{Status: 200 + i%2*300}, nil)
				r.Wants(time.Now())
				if n := len(r.Entries()); n > 16 {
					t.Errorf("%d entries, want at most 16", n)
				}
			}
		})
	}
	all.Wait()
	if e := r.Find("0-0"); e != nil {
		t.Error("the first request is still kept")
	}
}
