package relay

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// streams of each form that somebody might send, their ends included.
var formStreams = map[Form]string{
	GenerateForm:  `data: {"request_id":"g","choices":[{"index":0,"finish_reason":null,"token_ids":[1,2]}]}` + "\n\n" + `data: {"request_id":"g","choices":[{"index":0,"finish_reason":"stop","token_ids":[3],"weight_versions":[{"version":"v","start":0,"end":3}]}],"usage":{"prompt_tokens":2,"total_tokens":5,"completion_tokens":3}}` + "\n\ndata: [DONE]\n\n",
	NativeForm:    `data: {"text":"a","output_ids":[1],"meta_info":{"id":"n","finish_reason":null,"prompt_tokens":2,"completion_tokens":1}}` + "\n\n" + `data: {"text":"a b","output_ids":[1,2],"meta_info":{"id":"n","finish_reason":{"type":"length","length":2},"prompt_tokens":2,"completion_tokens":2,"cached_tokens":1}}` + "\n\ndata: [DONE]\n\n",
	MessagesForm:  "event: message_start\n" + `data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":2,"output_tokens":0}}}` + "\n\nevent: content_block_start\n" + `data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}` + "\n\nevent: content_block_delta\n" + `data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}` + "\n\nevent: message_stop\n" + `data: {"type":"message_stop"}` + "\n\n",
	ResponsesForm: "event: response.created\n" + `data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_r","status":"in_progress","output":[],"usage":null}}` + "\n\nevent: response.output_text.delta\n" + `data: {"type":"response.output_text.delta","sequence_number":1,"item_id":"i","delta":"hi"}` + "\n\n",
	ChatForm:      `data: {"id":"c","choices":[{"index":0,"delta":{"content":"hi"},"token_ids":[1]}],"prompt_token_ids":[7,8]}` + "\n\ndata: [DONE]\n\n",
}

const followed = `data: {"id":"cmpl-x","choices":[{"index":0,"text":" on","finish_reason":null,"token_ids":[9]}]}` + "\n\n" + `data: {"id":"cmpl-x","choices":[{"index":0,"text":" end","finish_reason":"length","token_ids":[10]}]}` + "\n\n" + `data: {"id":"cmpl-x","choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}` + "\n\ndata: [DONE]\n\n"

// told runs the events of body through tr.
func told(tr *Transcript, body string) string {
	var out []byte
	for _, e := range strings.SplitAfter(body, "\n\n") {
		if strings.HasSuffix(e, "\n\n") { // the framer gives whole events
			out = tr.Event(out, []byte(e))
		}
	}
	return string(out)
}

// TestUndisturbedFormsPass: until an engine fails the client gets its own bytes.
func TestUndisturbedFormsPass(t *testing.T) {
	for form, body := range formStreams {
		if form == ChatForm {
			continue
		}
		tr := &Transcript{Form: form, ShowIDs: form == GenerateForm || form == NativeForm, NoText: form == GenerateForm, ByText: form == MessagesForm || form == ResponsesForm, Prompt: PackIDs([]uint32{7, 8}), holds: true}
		if got := told(tr, body); got != body {
			t.Errorf("form %d: got\n%s\nwant\n%s", form, got, body)
		}
		if tr.Stuck() != "" || !tr.ByText && len(tr.Out) == 0 || tr.ByText && string(tr.Text()) != "hi" {
			t.Errorf("form %d: stuck %q, out %v, text %q", form, tr.Stuck(), tr.Out, tr.Text())
		}
	}
}

// TestFailuresOfForms: the engine's fault is held back, the client's own is shown.
func TestFailuresOfForms(t *testing.T) {
	for _, k := range []struct {
		form  Form
		event string
		held  bool
	}{
		{GenerateForm, `data: {"error":{"message":"x","code":500}}`, true},
		{GenerateForm, `data: {"error":{"message":"x","code":400}}`, false},
		{NativeForm, `data: {"error":{"message":"x","code":503}}`, true},
		{NativeForm, `data: {"text":"a","output_ids":[1],"meta_info":{"id":"n","finish_reason":{"type":"abort","message":"KVTransferError","status_code":500}}}`, true},
		{NativeForm, `data: {"text":"a","output_ids":[1],"meta_info":{"id":"n","finish_reason":{"type":"abort","message":"no","status_code":400}}}`, false},
		{MessagesForm, "event: error\ndata: " + `{"type":"error","error":{"type":"overloaded_error","message":"x"}}`, true},
		{MessagesForm, "event: error\ndata: " + `{"type":"error","error":{"type":"invalid_request_error","message":"x"}}`, false},
		{ResponsesForm, "event: error\ndata: " + `{"type":"error","sequence_number":3,"code":"500","message":"x"}`, true},
		{ResponsesForm, "event: error\ndata: " + `{"type":"error","sequence_number":3,"code":"400","message":"x"}`, false},
		{ResponsesForm, "event: response.failed\ndata: " + `{"type":"response.failed","sequence_number":3,"response":{}}`, true},
	} {
		tr := &Transcript{Form: k.form, holds: true}
		got := told(tr, k.event+"\n\n")
		if held := got == "" && tr.Failed() != nil; held != k.held || !held && (got != k.event+"\n\n" || tr.Stuck() != "refused") {
			t.Errorf("%s: held %v, got %q, stuck %q", k.event, held, got, tr.Stuck())
		}
	}
}

// TestNativeModes: which of the two SGLang speaks shows by the count of tokens.
func TestNativeModes(t *testing.T) {
	event := func(text, ids string, total string) string {
		return `data: {"text":"` + text + `","output_ids":` + ids + `,"meta_info":{"id":"n","completion_tokens":` + total + "}}\n\n"
	}
	yes, no := true, false
	for _, k := range []struct {
		name, body string
		deltas     *bool
		out, why   string
	}{
		{"all so far", event("a", "[1]", "1") + event("ab", "[1,2]", "2") + event("abc", "[1,2,3]", "3"), nil, "[1 2 3]", ""},
		{"what is new", event("a", "[1]", "1") + event("b", "[2]", "2") + event("cd", "[3,4]", "4"), nil, "[1 2 3 4]", ""},
		{"what is new, as many again", event("a", "[1]", "1") + event("b", "[2]", "2") + event("", "[]", "2"), nil, "[1 2]", ""},
		{"one event", event("a", "[1]", "1"), nil, "[1]", "unreadable"},
		{"one event, told", event("a", "[1]", "1"), &no, "[1]", ""},
		{"one event, told new", event("a", "[1]", "1"), &yes, "[1]", ""},
		{"half a letter", event("a", "[1]", "1") + event("a", "[1,2]", "2"), nil, "[1 2]", "half_character"},
		{"nonsense", event("a", "[1]", "1") + event("b", "[2]", "7"), nil, "[1]", "unreadable"},
		{"no ids", `data: {"text":"a","meta_info":{"id":"n","completion_tokens":1}}` + "\n\n", nil, "[]", ""},
	} {
		tr := &Transcript{Form: NativeForm, ShowIDs: true, Deltas: k.deltas, Prompt: PackIDs([]uint32{7}), holds: true}
		told(tr, k.body)
		out, _ := json.Marshal(tr.Out)
		if got := strings.ReplaceAll(string(out), ",", " "); got != k.out && !(k.out == "[]" && got == "null") || tr.Why() != k.why {
			t.Errorf("%s: out %s, want %s; why %q, want %q", k.name, got, k.out, tr.Why(), k.why)
		}
	}
}

// Whatever events come, nothing panics and nothing grows without bound; what is
// JSON stays JSON.
func FuzzForms(f *testing.F) {
	for _, form := range []Form{CompletionsForm, ChatForm} {
		f.Add(uint8(form)|128|64, many(0, "a", "null", "[1]")+many(2, "b", "null", "[2]"), many(1, "c", `"length"`, "[3]")+many(0, "d", `"stop"`, "[4]")+usageEvent+doneEvent)
	}
	for form, body := range formStreams {
		f.Add(uint8(form), body, followed)
		f.Add(uint8(form), body, body)
	}
	f.Fuzz(func(t *testing.T, form uint8, first, second string) {
		fm := Form(form % 6)
		tr := &Transcript{Form: fm, ShowIDs: form&8 != 0, NoText: form&16 != 0, ByText: form&32 != 0, Scores: form&64 != 0, KeepText: form&64 != 0, Prompt: PackIDs([]uint32{7, 8}), holds: true}
		if form&128 != 0 {
			tr.Choices, tr.Limit = 3, 4
		}
		told(tr, first)
		if tr.Told > len(tr.Out) {
			t.Fatalf("told %d of %d", tr.Told, len(tr.Out))
		}
		tr.Why()
		if tr.ByText {
			tr.Out, tr.Told, tr.ByText = []uint32{1}, 1, false
		}
		tr.rare().failed = nil
		tr.speak().event(nil, []byte(": comment\n\n"))
		tr.Turn()
		out := told(tr, second) + string(tr.AppendEnd(nil, true))
		for _, e := range strings.SplitAfter(second, "\n\n") {
			if data := DataOf([]byte(e)); len(data) > 0 && !bytes.Equal(data, done) && !json.Valid(data) {
				return
			}
		}
		for _, e := range strings.SplitAfter(first, "\n\n") {
			if data := DataOf([]byte(e)); len(data) > 0 && !bytes.Equal(data, done) && !json.Valid(data) {
				return
			}
		}
		for _, e := range strings.SplitAfter(out, "\n\n") {
			if data := DataOf([]byte(e)); len(data) > 0 && !bytes.Equal(data, done) && !json.Valid(data) {
				t.Fatalf("no JSON: %q", data)
			}
		}
	})
}

// TestNoBeginning: a stream whose end repeats its first event cannot go on without it.
func TestNoBeginning(t *testing.T) {
	for form, body := range formStreams {
		tr := &Transcript{Form: form, Prompt: PackIDs([]uint32{7, 8}), ByText: true, holds: true}
		want := ""
		if form == MessagesForm || form == ResponsesForm {
			want = "no_beginning"
		}
		if why := tr.Why(); why != want || tr.leaves() != (want == "") {
			t.Errorf("form %d: why %q, leaves %v", form, why, tr.leaves())
		}
		first, _, _ := strings.Cut(body, "\n\n")
		told(tr, first+"\n\n")
		if why := tr.Why(); why == "no_beginning" {
			t.Errorf("form %d behind its first event: %q", form, why)
		}
	}
}
