package requestlog

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestParseTraceparent(t *testing.T) {
	const id, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	for header, want := range map[string]string{
		"00-" + id + "-" + span + "-01":                      id + " " + span + " true",
		"00-" + id + "-" + span + "-00":                      id + " " + span + " false",
		"00-" + id + "-" + span + "-03":                      id + " " + span + " true",
		"cc-" + id + "-" + span + "-01":                      id + " " + span + " true",
		"cc-" + id + "-" + span + "-01-what-comes":           id + " " + span + " true",
		"cc-" + id + "-" + span + "-01what-comes":            "",
		"00-" + id + "-" + span + "-01-more":                 "",
		"ff-" + id + "-" + span + "-01":                      "",
		"00-" + strings.Repeat("0", 32) + "-" + span + "-01": "",
		"00-" + id + "-" + strings.Repeat("0", 16) + "-01":   "",
		"00-" + strings.ToUpper(id) + "-" + span + "-01":     "",
		"00-" + id[:31] + "g-" + span + "-01":                "",
		"00_" + id + "-" + span + "-01":                      "",
		"00-" + id + "-" + span:                              "",
		"":                                                   "",
	} {
		got := ""
		if c, ok := ParseTraceparent([]byte(header)); ok {
			got = fmt.Sprintf("%x %x %v", c.ID, c.Span, c.Sampled)
		}
		if got != want {
			t.Errorf("%q: got %q, want %q", header, got, want)
		}
	}
}

func FuzzParseTraceparent(f *testing.F) {
	f.Add([]byte("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, ok := ParseTraceparent(b)
		if !ok {
			return
		}
		again, ok := ParseTraceparent([]byte(formatTraceparent(c.ID, c.Span, c.Sampled)))
		if !ok || again != c {
			t.Errorf("%q is read as %v and then as %v", b, c, again)
		}
	})
}

type keepAll struct {
	mu      sync.Mutex
	entries []*Entry
}

func (k *keepAll) Add(e *Entry) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.entries = append(k.entries, e)
}

func (k *keepAll) Sample(TraceContext, string) bool { return true }

// TestEntry: what happens after the end of a request does not change its entry, an unfinished leg
// ends with the request, and a second end has no effect.
func TestEntry(t *testing.T) {
	k := new(keepAll)
	id := []byte("borrowed")
	received := time.Now()
	e := New(k).Begin(Request{ID: string(id), Received: received})
	first := e.StartLeg("prefill", "p0", 0, 32, received)
	second := e.StartLeg("decode", "d0", 1, 16, received.Add(time.Millisecond))
	if a, b := e.LegTraceparent(first), e.LegTraceparent(second); a == b || a[:36] != b[:36] || !strings.HasSuffix(a, "-01") {
		t.Errorf("the legs' traceparents are %q and %q; want two spans of one sampled trace", a, b)
	}
	e.EndLeg(first, "ok", time.Millisecond)
	e.Finish(Outcome{Status: 200, Total: 5 * time.Millisecond, Transfer: Transfer{State: "done", Span: Span{Took: time.Millisecond}}}, 40)
	e.EndLeg(second, "ok", time.Hour)
	e.AddRetry()
	e.SetFallback("late")
	if n := e.StartLeg("decode", "d1", 0, 0, time.Now()); n != NoLeg {
		t.Errorf("a finished entry took leg %d", n)
	}
	e.Finish(Outcome{Status: 500}, 0)
	if len(k.entries) != 1 {
		t.Fatalf("the sink received %d entries, want one", len(k.entries))
	}
	got := k.entries[0]
	if d := got.Legs[1]; len(got.Legs) != 2 || d.Outcome != "unfinished" || d.Took != 4*time.Millisecond {
		t.Errorf("the legs are %+v; want the second unfinished after 4ms", got.Legs)
	}
	if got.Status != 200 || got.Retries != 0 || got.Fallback != "" || got.PromptTokens != 40 {
		t.Errorf("the entry changed after its end: %+v", got)
	}
	if want := received.Add(time.Millisecond); !got.Transfer.Began.Equal(want) {
		t.Errorf("the transfer began at %v, want %v, when prefill had ended", got.Transfer.Began, want)
	}
}

// TestEntryIsBounded: a request that is tried many times does not grow its entry without limit.
func TestEntryIsBounded(t *testing.T) {
	k := new(keepAll)
	e := New(k).Begin(Request{})
	for range 100 {
		e.EndLeg(e.StartLeg("decode", "d0", 0, 0, time.Now()), "5xx", 0)
		e.AddChoice("decode", "d0", 0, time.Now())
	}
	e.Finish(Outcome{}, 0)
	if len(e.Legs) != maxLegs || len(e.Choices) != maxChoices || e.Dropped != 200-maxLegs-maxChoices {
		t.Errorf("%d legs, %d choices, %d dropped; want %d, %d and the rest", len(e.Legs), len(e.Choices), e.Dropped, maxLegs, maxChoices)
	}
}

// TestNoLog: without a sink nothing is collected, and every method may be called.
func TestNoLog(t *testing.T) {
	l := New()
	n := testing.AllocsPerRun(100, func() {
		e := l.Begin(Request{ID: "x"})
		e.EndLeg(e.StartLeg("whole", "w", 0, 0, time.Time{}), "ok", 0)
		e.SetTokenized(time.Time{}, 1)
		e.AddWait(time.Time{})
		e.SetPlan("whole", "")
		e.Finish(Outcome{}, 0)
	})
	if n != 0 {
		t.Errorf("%v allocations a request without a log", n)
	}
}
