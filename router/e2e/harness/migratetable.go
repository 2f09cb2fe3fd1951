package harness

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"sluice/bench/sim"
)

// KilledStream kills the engine of a stream. It returns the text of a table cell for the stream
// that the client received, and one for the source of the token ids in the resumed request.
func (m *MigrationFleet) KilledStream(t *testing.T, f *EndpointCase) (got, ids string) {
	t.Helper()
	body := f.Request(33, true)
	want := f.Read(Post(t, m.Reference.URL()+f.Path, body))
	m.Fail("dies", sim.Fault{Kind: sim.Reset, After: 9})
	a := Post(t, m.URL+f.Path, body, "X-Request-Id", "dies")
	defer m.Clear()
	h := f.Read(a)
	h.id, want.id = nil, nil
	asked, made := false, false
	for _, e := range m.Engines {
		for _, r := range e.Requests() {
			asked = asked || bytes.Contains(r.Body, []byte(`"return_token_ids":true`)) && bytes.Contains(r.Body, []byte(`"stream":true`)) && r.Path == f.Path
			made = made || r.Path == "/tokenize" && !bytes.Contains(r.Body, []byte(`go on`))
		}
	}
	ids = "in every stream"
	header := a.Header.Get("X-Sluice-Migration")
	switch {
	case header != "ready":
		ids = "unavailable"
	case made:
		ids = "from the text"
	case asked:
		ids = "requested"
	}
	switch {
	case reflect.DeepEqual(h, want) && header == "ready":
		return "goes on elsewhere", ids
	case len(h.Broken) > 0 && strings.HasPrefix(want.Text, h.Text):
		return "error event (`" + strings.TrimPrefix(header, "no; ") + "`)", ids
	}
	t.Errorf("migration %q: %+v, want %+v", header, h, want)
	return "wrong", ids
}

// KilledWhole is KilledStream for a request that is not streamed.
func (m *MigrationFleet) KilledWhole(t *testing.T, f *EndpointCase) string {
	t.Helper()
	body := f.Request(33, false)
	want := Post(t, m.Reference.URL()+f.Path, body)
	for _, kind := range []sim.FaultKind{sim.Reset, sim.Truncate} {
		for _, phase := range []string{"", "body"} {
			id := "whole" + kind.String() + phase
			m.Fail(id, sim.Fault{Kind: kind, Phase: phase, After: 5})
			a := Post(t, m.URL+f.Path, body, "X-Request-Id", id)
			tried := 0
			for _, e := range m.Engines {
				for _, r := range e.Requests() {
					if r.Path == f.Path && strings.HasPrefix(r.Header("X-Request-Id"), id) {
						tried++
					}
				}
			}
			if a.Status != 200 || tried < 2 || !reflect.DeepEqual(normalizedAnswer(t, a.Body), normalizedAnswer(t, want.Body)) {
				t.Errorf("%s %q: status %d after %d tries\ngot  %s\nwant %s", kind, phase, a.Status, tried, a.Body, want.Body)
				return "wrong"
			}
			m.Clear()
		}
	}
	return "run again elsewhere"
}

// normalizedAnswer returns a response without the members that differ between two runs.
func normalizedAnswer(t *testing.T, body []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		t.Errorf("%v in %s", err, body)
	}
	var scrub func(v any)
	scrub = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for k, x := range v {
				switch k {
				case "id", "request_id", "created", "created_at", "e2e_latency", "system_fingerprint":
					delete(v, k)
				default:
					scrub(x)
				}
			}
		case []any:
			for _, x := range v {
				scrub(x)
			}
		}
	}
	scrub(v)
	return v
}
