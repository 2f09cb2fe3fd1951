package transcript

import (
	"fmt"
	"testing"
)

// Streams have the text around their own id and time together; each tells the others' events
// from its own.
func TestStreamsShareAShape(t *testing.T) {
	event := func(id string, created int, content string) []byte {
		return fmt.Appendf(nil, `{"id":"chatcmpl-%s","object":"chat.completion.chunk","created":%d,"model":"TestStreamsShareAShape","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}`, id, created, content)
	}
	learned := func(id string, created int) *EventTemplate {
		t := new(EventTemplate)
		e := event(id, created, "some")
		at := len(e) - len(`some"},"finish_reason":null}]}`)
		t.Learn(e, at, at+len("some"))
		return t
	}
	a, b := learned("a1", 1700000000), learned("b22", 1700000001)
	if a.shape != b.shape {
		t.Error("two streams of one model have a shape each")
	}
	for _, c := range []struct {
		id      string
		created int
		a, b    bool
	}{{"a1", 1700000000, true, false}, {"b22", 1700000001, false, true}, {"a1", 1700000001, false, false}, {"b22", 1700000000, false, false}, {"a", 1700000000, false, false}} {
		e := event(c.id, c.created, `an \"other\"`)
		if a.Matches(e) != c.a || b.Matches(e) != c.b {
			t.Errorf("%s: %v, %v", e, a.Matches(e), b.Matches(e))
		}
		for n := range e {
			if a.Matches(e[:n]) || b.Matches(e[:n]) {
				t.Errorf("%s matches", e[:n])
			}
		}
	}
	if len(a.IDAndTime)+len(b.IDAndTime) > 60 {
		t.Errorf("of their own they have %q and %q", a.IDAndTime, b.IDAndTime)
	}
}

// A stream whose events always differ is walked, and fills the table for nobody.
func TestShapesAreBounded(t *testing.T) {
	one := new(EventTemplate)
	for i := range 1000 {
		e := fmt.Appendf(nil, `{"x%d":"y"}`, i)
		one.Learn(e, len(e)-3, len(e)-2)
		if learned := one.shape != nil; learned != (i < maxLearned) {
			t.Fatalf("learned %v after %d", learned, i)
		}
	}
	for i := range 2 * maxShapes {
		new(EventTemplate).Learn(fmt.Appendf(nil, `{"z%d":"y"}`, i), 8, 8)
	}
	if n := len(*shapes.all.Load()); n > maxShapes {
		t.Errorf("%d shapes are kept", n)
	}
}
