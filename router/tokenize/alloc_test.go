package tokenize

import (
	"strings"
	"testing"
)

// A prompt found without asking an engine must not allocate: it is on the path
// of every request.
func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
	e := newEngine(t)
	chat := `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"` + strings.Repeat("words ", 500) + `"}]}],"tools":[{"a":1}]}`
	for _, tc := range []struct {
		name string
		kind Kind
		body string
		mode string
		want Source
	}{
		{"cache", Chat, chat, ModeAuto, FromCache},
		{"text", Chat, chat, ModeText, FromText},
		{"ids", Completion, `{"prompt":[[1,2,3,4,5,6,7,8],[9]]}`, ModeAuto, FromRequest},
	} {
		tk := New(Options{Mode: tc.mode, Timeout: patient.Timeout})
		doc := scanned(t, tc.body)
		var p Prompt
		tk.Prompt(&p, tc.kind, doc, e.ep, nil)
		n := testing.AllocsPerRun(100, func() { tk.Prompt(&p, tc.kind, doc, e.ep, nil) })
		if n != 0 || p.Source != tc.want {
			t.Errorf("%s: %v allocations, from %v", tc.name, n, p.Source)
		}
	}
}
