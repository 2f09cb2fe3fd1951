package transcript

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

// idEvent is an event as an engine sends it when it was asked for token ids.
func idEvent(text string, ids ...int) string {
	list := strings.ReplaceAll(strings.Trim(fmt.Sprint(ids), "[]"), " ", ",")
	return `data: {"id":"chatcmpl-a","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"content":"` + text +
		`"},"logprobs":null,"finish_reason":null,"token_ids":[` + list + "]}]}\n\n"
}

// plainEvent is the same where it was not asked.
func plainEvent(text string) string {
	return `data: {"id":"chatcmpl-a","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"content":"` + text +
		`"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n"
}

const (
	roleEvent = `data: {"id":"chatcmpl-a","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":%s}` + "\n\n"
	doneEvent = "data: [DONE]\n\n"
)

// TestTranscriptHidesIDs: a client that did not ask sees what it would have seen.
func TestTranscriptHidesIDs(t *testing.T) {
	texts := []struct {
		text string
		ids  []int
	}{{"Hello", []int{1}}, {" there", []int{22}}, {" \\\"token_ids\\\":[7]", []int{333, 4}}, {"x", []int{4294967295}}, {"", []int{9}}, {"\\ufffd", []int{5}}, {"é", []int{6}}, {" end", []int{0}}}
	tr := &Transcript{Format: ChatFormat}
	var got, want []byte
	got = tr.Event(got, fmt.Appendf(nil, roleEvent, "[10,11,12]"))
	want = fmt.Appendf(want, roleEvent, "null")
	var ids []uint32
	for _, e := range texts {
		got = tr.Event(got, []byte(idEvent(e.text, e.ids...)))
		want = append(want, plainEvent(e.text)...)
		for _, id := range e.ids {
			ids = append(ids, uint32(id))
		}
	}
	if string(got) != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if !slices.Equal(tr.Prompt.Append(nil), []uint32{10, 11, 12}) || !slices.Equal(tr.Out, ids) || tr.Delivered != len(ids) || tr.Blocked() != "" {
		t.Errorf("prompt %v, out %v, delivered %d, stuck %q", tr.Prompt.Append(nil), tr.Out, tr.Delivered, tr.Blocked())
	}
	if tr.template.shape == nil || int(tr.template.shape.mid) == len(tr.template.shape.text) {
		t.Error("no template was learned: every event is walked")
	}
	shown := &Transcript{Format: ChatFormat, ShowIDs: true}
	for _, e := range []string{fmt.Sprintf(roleEvent, "[1]"), idEvent("a", 1), idEvent("b", 2), idEvent("c", 3)} {
		if got := shown.Event(nil, []byte(e)); string(got) != e {
			t.Errorf("a client that asked for ids gets %q, not %q", got, e)
		}
	}
}

// Only the state that a migratable stream's first event creates is kept: there are
// thousands, and what lies among their memory for a moment leaves holes in it.
func TestFirstEventRetainsLittle(t *testing.T) {
	ids := make([]uint32, 64)
	for i := range ids {
		ids[i] = uint32(100_000 + i)
	}
	list := strings.ReplaceAll(fmt.Sprint(ids), " ", ", ")
	first, second := fmt.Appendf(nil, roleEvent, list), []byte(idEvent("a", 1))
	packed, out := PackIDs(ids), make([]byte, 0, 4<<10)
	(&Transcript{Format: ChatFormat}).Event(out, first) // the model's shapes are known from its first stream on
	(&Transcript{Format: ChatFormat}).Event(out, second)
	tr := new(Transcript)
	n := testing.AllocsPerRun(100, func() {
		*tr = Transcript{Format: ChatFormat, Prompt: packed}
		tr.Event(out, first)
		if !tr.promptSeen || unsafe.StringData(tr.Prompt.packed) != unsafe.StringData(packed.packed) || tr.eventHead() == "" || tr.extras != nil {
			t.Fatalf("after its first event: %+v", tr)
		}
		tr.Event(out, second)
	})
	// Its id and time, its one id, and the string that begin makes here.
	if n != 3 && !raceEnabled {
		t.Errorf("%v allocations for a stream's first events, want 3", n)
	}
	for _, other := range []string{
		"[1]", "[]", "null",
		strings.Replace(list, "100000", "7", 1), strings.Replace(list, "[", "[1, ", 1), strings.Replace(list, "]", ", 1]", 1),
	} {
		if packed.equal([]byte(other)) {
			t.Errorf("%s passes for the prompt's ids", other)
		}
	}
}

// The splice point lies behind the last token whose text is out whole.
func TestTranscriptStopsBeforePartialRune(t *testing.T) {
	for _, half := range []string{"", "\ufffd", `x\ufffd`} {
		tr := &Transcript{Format: ChatFormat}
		for _, e := range []string{fmt.Sprintf(roleEvent, "[1]"), idEvent("a", 2), idEvent("b", 3), idEvent(half, 4)} {
			tr.Event(nil, []byte(e))
		}
		if tr.Delivered != 2 || len(tr.Out) != 3 || tr.PartialRune != (half != "") {
			t.Errorf("after %q: delivered %d of %d, half %v", half, tr.Delivered, len(tr.Out), tr.PartialRune)
		}
		if tr.Event(nil, []byte(idEvent("c", 5))); tr.Delivered != 4 || tr.PartialRune {
			t.Errorf("after %q and a whole letter: delivered %d, half %v", half, tr.Delivered, tr.PartialRune)
		}
	}
}

// Events after which another engine cannot continue the stream.
func TestTranscriptIsBlocked(t *testing.T) {
	for want, events := range map[string][]string{
		"no_ids":           {plainEvent("a")},
		"reasoning":        {fmt.Sprintf(roleEvent, "[1]"), strings.Replace(idEvent("a", 1), `"content"`, `"reasoning"`, 1)},
		"tools":            {fmt.Sprintf(roleEvent, "[1]"), strings.Replace(idEvent("a", 1), `"content":"a"`, `"tool_calls":[{"index":0}]`, 1)},
		"multiple_choices": {fmt.Sprintf(roleEvent, "[1]"), strings.Replace(idEvent("a", 1), `"index":0`, `"index":1`, 1)},
		"refused":          {fmt.Sprintf(roleEvent, "[1]"), `data: {"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}` + "\n\n"},
		"unreadable":       {"data: {\"a\":[}\n\n"},
	} {
		tr := &Transcript{Format: ChatFormat, holdsFailure: true}
		out := ""
		for _, e := range events {
			out += string(tr.Event(nil, []byte(e)))
		}
		if tr.Blocked() != want || tr.FailureEvent() != nil {
			t.Errorf("%q gives %q, held %q; want %s", events, tr.Blocked(), tr.FailureEvent(), want)
		}
		if want == "refused" && !strings.Contains(out, `"code":400`) {
			t.Errorf("the client got no error event: %q", out)
		}
	}
}
