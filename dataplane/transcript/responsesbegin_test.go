package transcript

import (
	"strings"
	"testing"
)

// A Responses stream whose engine fails right behind response.created goes on with
// response.in_progress, once, whichever engine sends it.
func TestResponsesResumeAfterCreated(t *testing.T) {
	for _, running := range []bool{false, true} {
		r := &responsesStream{t: new(Transcript), response: []byte(`{"id":"resp_x"}`), seq: 1, inProgressSent: running}
		n := &responsesResumed{first: r}
		got := string(n.appendPartAdded(n.appendPartAdded(nil)))
		if want := "event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"sequence_number\":1,\"response\":{\"id\":\"resp_x\"}}\n\n"; strings.HasPrefix(got, want) == running ||
			strings.Count(got, "event: response.output_item.added") != 1 {
			t.Errorf("in_progress sent before: %v: %q", running, got)
		}
	}
}
