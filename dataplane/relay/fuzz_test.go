package relay

import (
	"bytes"
	"encoding/json"
	"testing"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"sluice/dataplane/transcript"
)

// Events are the same wherever the stream is cut, and the carry is bounded.
func FuzzEvents(f *testing.F) {
	for _, c := range captures {
		body := load(f, c.file)
		f.Add(body, uint8(c.protocol), uint(len(body)/2), uint(3))
		f.Add(bytes.ReplaceAll(body, []byte("\n"), []byte("\r\n")), uint8(c.protocol), uint(17), uint(1))
	}
	f.Add([]byte("data: {\"choices\":[{\"text\":\"a\",\"f\":1}]}\n\ndata: {\"choices\":[{\"text\":\"b\\\"\",\"f\":1}]}\n\ndata: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"x\"}]}\n\n"), uint8(0), uint(4), uint(1))
	f.Add([]byte(": x\n\n\r\n\r\ndata:\n\ndata: {\"choices\":[{"), uint8(0), uint(4), uint(1))
	f.Fuzz(func(t *testing.T, body []byte, protocol uint8, cut, step uint) {
		p := sse.Protocol(protocol % 3)
		at := int(cut % uint(len(body)+1))
		want := scanAll(p, body)
		if got := scanAll(p, body[:at], body[at:]); got != want && len(body) < sse.MaxPartialEvent {
			t.Fatalf("cut at %d: %+v, whole %+v", at, got, want)
		}
		s := newScanner(p)
		defer s.Release()
		// Without templates every event is walked: the same must come out.
		plain := newScanner(p)
		defer plain.Release()
		for rest := body; len(rest) > 0; {
			n, event, tooBig := plain.Next(rest)
			rest = rest[n:]
			if tooBig {
				plain.events++
				plain.tooBig++
			}
			if event != nil {
				plain.template = transcript.EventTemplate{IDAndTime: plain.template.IDAndTime}
				plain.event(event)
				plain.Release()
			}
		}
		if got := scanResultOf(plain); got != want {
			t.Fatalf("walked %+v, by template %+v", got, want)
		}
		n := int(step%64) + 1
		for i := 0; i < len(body); i += n {
			s.feed(body[i:min(i+n, len(body))])
			if s.Partial != nil && len(s.Partial.B) > sse.MaxPartialEvent {
				t.Fatal("carry over its bound")
			}
		}
		if got := scanResultOf(s); got != want && len(body) < sse.MaxPartialEvent {
			t.Fatalf("by %d: %+v, whole %+v", n, got, want)
		}
	})
}

// On well-formed JSON the walker steps over exactly one value and sees the
// members encoding/json sees; on anything else it ends.
func FuzzWalk(f *testing.F) {
	for _, s := range []string{`{"a":1,"b":[{"c":"\"}"}],"d":null}`, `"x\\"`, `[1,2,[],{}]`, `{"a":[1,2],"b":[3,"]",4],"c":[5,[6]],"d":[7,{"e":[]}],"f":[8 ]}`, `[1}]`, `{"usage":{"prompt_tokens":1}}`, `{"a"`, `{"a":"` + string(bytes.Repeat([]byte("x"), 50)) + `\""}`, ` {} `} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		UsageOf(b)
		w := jsonscan.Cursor{Data: b}
		keys := map[string]bool{}
		if w.Enter('{') {
			for key, ok := w.Member(); ok; key, ok = w.Member() {
				keys[string(key)] = true
				w.Skip()
			}
		}
		if !json.Valid(b) {
			return
		}
		if w.Bad || w.Peek() != 0 || w.Pos != len(b) {
			t.Fatalf("%q: bad %v, stopped at %d of %d", b, w.Bad, w.Pos, len(b))
		}
		whole := jsonscan.Cursor{Data: b}
		if whole.Skip(); whole.Bad || whole.Peek() != 0 {
			t.Fatalf("%q: skip stopped at %d of %d", b, whole.Pos, len(b))
		}
		var m map[string]json.RawMessage
		if json.Unmarshal(b, &m) != nil || bytes.ContainsAny(b, "\\") {
			return
		}
		for k := range keys {
			if _, ok := m[k]; !ok && json.Valid([]byte(`"`+k+`"`)) && k == string([]rune(k)) {
				t.Fatalf("%q: member %q is not there", b, k)
			}
		}
		if len(m) > len(keys) {
			t.Fatalf("%q: %d members, encoding/json sees %d", b, len(keys), len(m))
		}
	})
}
