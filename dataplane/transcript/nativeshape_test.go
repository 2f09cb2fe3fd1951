package transcript

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// readNative describes what a Transcript has made of a stream's events. walked: it knows no shape, so
// that it walks each event. The engine is replaced before event number leave.
func readNative(events [][]byte, deltas *bool, leave int, walked bool) string {
	t := &Transcript{Format: NativeFormat, ShowIDs: true, Deltas: deltas, Prompt: PackIDs([]uint32{7, 8}), holdsFailure: true}
	if len(events) > 0 && bytes.Contains(events[0], []byte(`"choices"`)) {
		t.Format, t.NoText = GenerateFormat, true
	}
	var out []byte
	for i, e := range events {
		if i == leave {
			t.SwitchEngine()
		}
		if own, ok := t.formatter.(*nativeStream); ok && walked {
			own.shape = NativeShape{}
		}
		if own, ok := t.formatter.(*generateStream); ok && walked {
			own.shape = jsonscan.EventShape{}
		}
		out = t.Event(out, slices.Clone(e))
		out = fmt.Appendf(out, "%v delivered %d half %v stuck %q failed %q finished %v\n",
			t.Out, t.Delivered, t.PartialRune, t.Blocked(), t.FailureEvent(), t.Finished)
	}
	return string(out)
}

// TestNativeShapeChangesNothing: in every mode, and over a splice point, events that have the
// shape of the one before are the same to a Transcript as events that it walks.
func TestNativeShapeChangesNothing(t *testing.T) {
	yes, no := true, false
	for _, first := range []bool{false, true} {
		for _, second := range []bool{false, true} {
			for _, deltas := range []*bool{nil, &yes, &no} {
				events := append(nativeEvents(6, first), nativeEvents(6, second)...)
				got := readNative(events, deltas, 6, false)
				if want := readNative(events, deltas, 6, true); got != want {
					t.Errorf("cumulative %v, then %v: got\n%swalked\n%s", first, second, got, want)
				}
			}
		}
	}
	own := newNativeStream(&Transcript{Format: NativeFormat, Prompt: PackIDs([]uint32{7})})
	for i, e := range nativeEvents(4, true) {
		data := sse.EventData(e)
		if i > 0 && !own.matchShape(data) {
			t.Errorf("event %d does not have the shape", i)
		}
		own.shape.Cumulative = false
		own.read(data)
	}
}

// TestGenerateShapeChangesNothing: likewise for vLLM's generate, whose first event may
// have the prompt's ids.
func TestGenerateShapeChangesNothing(t *testing.T) {
	var events [][]byte
	for _, rest := range []string{`"index":0,"token_ids":[1],"finish_reason":null}],"prompt_token_ids":[7,8]`, `"index":0,"token_ids":[2],"finish_reason":null}]`,
		`"index":0,"token_ids":[3, 4],"finish_reason":null}]`, `"index":0,"token_ids":[],"finish_reason":null}]`, `"index":0,"token_ids":[5],"finish_reason":null}]`,
		`"index":0,"token_ids":[6],"finish_reason":null}],"usage":{"prompt_tokens":2}`, `"index":1,"token_ids":[9],"finish_reason":null}]`,
		`"index":0,"token_ids":[10],"finish_reason":"length"}]`} {
		events = append(events, []byte(`data: {"request_id":"g","choices":[{`+rest+"}\n\n"))
	}
	for leave := range 5 {
		got := readNative(events, nil, leave+3, false)
		if want := readNative(events, nil, leave+3, true); got != want {
			t.Errorf("got\n%swalked\n%s", got, want)
		}
	}
	g := &generateStream{t: &Transcript{Format: GenerateFormat, NoText: true, Prompt: PackIDs([]uint32{7})}}
	g.event(nil, events[1])
	if !g.matchShape(events[2]) || !slices.Equal(g.t.Out, []uint32{2, 3, 4}) || g.t.Delivered != 3 {
		t.Errorf("the third event: %v, %d delivered", g.t.Out, g.t.Delivered)
	}
	if g.matchShape(events[3]) || g.matchShape(events[6]) || g.matchShape(events[7]) {
		t.Error("an event that says more has the shape")
	}
}

// FuzzNativeShape: whatever the events.
func FuzzNativeShape(f *testing.F) {
	lines := func(events [][]byte) (all []byte) {
		for _, e := range events {
			all = append(append(all, sse.EventData(e)...), '\n')
		}
		return all
	}
	f.Add(lines(nativeEvents(4, true)), uint8(0))
	f.Add(lines(append(nativeEvents(3, false), nativeEvents(3, true)...)), uint8(3<<2))
	f.Add([]byte(`{"output_ids":[1],"meta_info":{"completion_tokens":1}}
{"output_ids":[1,2],"meta_info":{"completion_tokens":2}}
{"text":"a","output_ids":[3],"index":1,"meta_info":{"completion_tokens":2}}
{"text":"\ufffd","output_ids":[3],"meta_info":{"completion_tokens":3.5}}
{"text":"b","output_ids":[4],"meta_info":{"completion_tokens":3.5}}
{"error":{"code":503}}`), uint8(1))
	f.Add([]byte(`{"request_id":"g","choices":[{"index":0,"token_ids":[1],"logprobs":null,"finish_reason":null}]}
{"request_id":"g","choices":[{"index":0,"token_ids":[2,3],"logprobs":null,"finish_reason":null}]}
{"request_id":"g","choices":[{"index":1,"token_ids":[4],"logprobs":null,"finish_reason":null}]}
{"request_id":"g","choices":[{"index":0,"token_ids":[5],"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}
{"request_id":"g","choices":[{"index":0,"text":"","token_ids":[5],"finish_reason":null}],"usage":null}
{"request_id":"g","choices":[{"index":0,"text":"a","token_ids":[5],"finish_reason":null}],"usage":null}`), uint8(0))
	f.Fuzz(func(t *testing.T, all []byte, mode uint8) {
		var events [][]byte
		for line := range bytes.Lines(all) {
			events = append(events, fmt.Appendf(nil, "data: %s\n\n", bytes.TrimRight(line, "\n")))
		}
		yes, no := true, false
		deltas := [...]*bool{nil, &yes, &no, nil}[mode&3]
		got := readNative(events, deltas, int(mode>>2), false)
		if want := readNative(events, deltas, int(mode>>2), true); got != want {
			t.Errorf("got\n%swalked\n%s", got, want)
		}
	})
}

// nativeEvents is a stream of SGLang 0.5.23 with one id an event, cumulative or not.
func nativeEvents(n int, cumulative bool) (events [][]byte) {
	var text strings.Builder
	var ids []string
	for i := range n {
		if !cumulative {
			text.Reset()
			ids = ids[:0]
		}
		fmt.Fprintf(&text, " w%d", i)
		ids = append(ids, fmt.Sprint(900+i))
		events = append(events, fmt.Appendf(nil, "data: {\"text\":%q,\"output_ids\":[%s],\"meta_info\":{\"id\":\"r\",\"finish_reason\":null,\"prompt_tokens\":4,\"completion_tokens\":%d,\"cached_tokens\":2,\"dp_rank\":null}}\n\n",
			text.String(), strings.Join(ids, ","), i+1))
	}
	return events
}
