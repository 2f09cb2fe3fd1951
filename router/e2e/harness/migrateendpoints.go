package harness

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"sluice/bench/sim"
)

// EndpointCase is one endpoint of one kind of engine, whose streams the router can migrate.
type EndpointCase struct {
	Name, Engine, Path, Body string
	Mod                      func(*sim.Options)
	Read                     func(*Answer) StreamRecord
}

// StreamRecord is the content of a stream in any API format, for comparison with another run.
// Members that differ between two runs, such as ids and times, are not part of it, but must be
// constant within a stream.
type StreamRecord struct {
	Text   string
	Ids    []float64
	kinds  []string // names of events, without repetitions
	Usage  any
	End    any // finish reason or final event
	Whole  any // the output that the final event repeats
	id     any
	Broken []string
}

// AddError records content that no stream may have. WantSameRecord accepts no record with errors.
func (h *StreamRecord) AddError(format string, args ...any) {
	h.Broken = append(h.Broken, fmt.Sprintf(format, args...))
}

// AddKind appends the name of an event, unless the event before it had the same name.
func (h *StreamRecord) AddKind(k string) {
	if n := len(h.kinds); n == 0 || h.kinds[n-1] != k {
		h.kinds = append(h.kinds, k)
	}
}

// WantConstant records an error if id is empty or differs from that of an earlier event.
func (h *StreamRecord) WantConstant(id any) {
	if h.id == nil {
		h.id = id
	}
	if id == nil || id == "" || id != h.id {
		h.AddError("id %v behind %v", id, h.id)
	}
}

// EachEvent calls f with the name and the JSON of each event of a stream. The final "[DONE]" is
// passed as a name.
func EachEvent(a *Answer, h *StreamRecord, f func(name string, v map[string]any)) {
	events := strings.SplitAfter(string(a.Body), "\n\n")
	if last := events[len(events)-1]; last != "" {
		h.AddError("it ends in %q", last)
	}
	for _, e := range events[:len(events)-1] {
		name, data := "", ""
		for line := range strings.Lines(e) {
			line = strings.TrimSuffix(line, "\n")
			switch key, value, _ := strings.Cut(line, ": "); {
			case key == "event" && name == "":
				name = value
			case key == "data" && data == "":
				data = value
			case line != "":
				h.AddError("line %q", line)
			}
		}
		if data == "[DONE]" {
			f(data, nil)
			continue
		}
		var v map[string]any
		if err := json.Unmarshal([]byte(data), &v); err != nil {
			h.AddError("%v in %q", err, data)
			continue
		}
		if v["error"] != nil || name == "error" {
			h.AddError("an error: %s", data)
		}
		f(name, v)
	}
}

// ValueAt returns the element of decoded JSON at a path of member names (string) and array indices
// (int), or nil if there is none.
func ValueAt(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[p]
		case int:
			l, _ := v.([]any)
			if p >= len(l) {
				return nil
			}
			v = l[p]
		}
	}
	return v
}

// Request returns the body of a request for at most most output tokens.
func (f *EndpointCase) Request(most int, stream bool) string {
	body := f.Body
	if !stream {
		body, _, _ = strings.Cut(body, `,"stream_options"`)
	}
	return fmt.Sprintf(`{"model":"sim","stream":%v,`, stream) + fmt.Sprintf(body, most) + `}`
}

// WantSameRecord checks that a was migratable to its end and has the content of want, the record of
// an engine without faults. Ids of responses may differ.
func (m *MigrationFleet) WantSameRecord(t *testing.T, what string, f *EndpointCase, a *Answer, want StreamRecord) {
	t.Helper()
	got := f.Read(a)
	if want.End == nil || want.Usage == nil || len(want.Broken) > 0 || want.Text == "" && len(want.Ids) == 0 {
		t.Fatalf("the undisturbed stream cannot be read: %+v", want)
	}
	got.id, want.id = nil, nil
	if h := a.Header.Get("X-Sluice-Migration"); a.Status != 200 || h != "ready" || !reflect.DeepEqual(got, want) {
		t.Errorf("%s: status %d, migration %q\ngot  %+v\nwant %+v\n%s", what, a.Status, h, got, want, a.Body[:min(len(a.Body), 4000)])
	}
}
