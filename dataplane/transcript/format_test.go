package transcript

import (
	"bytes"
	"encoding/json"
	"sluice/dataplane/sse"
	"strings"
	"testing"
)

// streams of each possible form, their ends included.
var formatStreams = map[APIFormat]string{
	GenerateFormat:  `data: {"request_id":"g","choices":[{"index":0,"finish_reason":null,"token_ids":[1,2]}]}` + "\n\n" + `data: {"request_id":"g","choices":[{"index":0,"finish_reason":"stop","token_ids":[3],"weight_versions":[{"version":"v","start":0,"end":3}]}],"usage":{"prompt_tokens":2,"total_tokens":5,"completion_tokens":3}}` + "\n\ndata: [DONE]\n\n",
	NativeFormat:    `data: {"text":"a","output_ids":[1],"meta_info":{"id":"n","finish_reason":null,"prompt_tokens":2,"completion_tokens":1}}` + "\n\n" + `data: {"text":"a b","output_ids":[1,2],"meta_info":{"id":"n","finish_reason":{"type":"length","length":2},"prompt_tokens":2,"completion_tokens":2,"cached_tokens":1}}` + "\n\ndata: [DONE]\n\n",
	MessagesFormat:  "event: message_start\n" + `data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":2,"output_tokens":0}}}` + "\n\nevent: content_block_start\n" + `data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}` + "\n\nevent: content_block_delta\n" + `data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}` + "\n\nevent: message_stop\n" + `data: {"type":"message_stop"}` + "\n\n",
	ResponsesFormat: "event: response.created\n" + `data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_r","status":"in_progress","output":[],"usage":null}}` + "\n\nevent: response.output_text.delta\n" + `data: {"type":"response.output_text.delta","sequence_number":1,"item_id":"i","delta":"hi"}` + "\n\n",
	ChatFormat:      `data: {"id":"c","choices":[{"index":0,"delta":{"content":"hi"},"token_ids":[1]}],"prompt_token_ids":[7,8]}` + "\n\ndata: [DONE]\n\n",
}

const resumedStream = `data: {"id":"cmpl-x","choices":[{"index":0,"text":" on","finish_reason":null,"token_ids":[9]}]}` + "\n\n" + `data: {"id":"cmpl-x","choices":[{"index":0,"text":" end","finish_reason":"length","token_ids":[10]}]}` + "\n\n" + `data: {"id":"cmpl-x","choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}` + "\n\ndata: [DONE]\n\n"

// sentText runs the events of body through tr.
func sentText(tr *Transcript, body string) string {
	var out []byte
	for _, e := range strings.SplitAfter(body, "\n\n") {
		if strings.HasSuffix(e, "\n\n") { // the framer gives whole events
			out = tr.Event(out, []byte(e))
		}
	}
	return string(out)
}

// TestUninterruptedFormatsPass: until an engine fails the client gets its own bytes.
func TestUninterruptedFormatsPass(t *testing.T) {
	for form, body := range formatStreams {
		if form == ChatFormat {
			continue
		}
		tr := &Transcript{Format: form, ShowIDs: form == GenerateFormat || form == NativeFormat, NoText: form == GenerateFormat, TextOnly: form == MessagesFormat || form == ResponsesFormat, Prompt: PackIDs([]uint32{7, 8}), holdsFailure: true}
		if got := sentText(tr, body); got != body {
			t.Errorf("form %d: got\n%s\nwant\n%s", form, got, body)
		}
		if tr.Blocked() != "" || !tr.TextOnly && len(tr.Out) == 0 || tr.TextOnly && string(tr.Text()) != "hi" {
			t.Errorf("form %d: stuck %q, out %v, text %q", form, tr.Blocked(), tr.Out, tr.Text())
		}
	}
}

// TestFailuresOfFormats: the engine's fault is held back, the client's own is shown.
func TestFailuresOfFormats(t *testing.T) {
	for _, k := range []struct {
		form  APIFormat
		event string
		held  bool
	}{
		{GenerateFormat, `data: {"error":{"message":"x","code":500}}`, true},
		{GenerateFormat, `data: {"error":{"message":"x","code":400}}`, false},
		{NativeFormat, `data: {"error":{"message":"x","code":503}}`, true},
		{NativeFormat, `data: {"text":"a","output_ids":[1],"meta_info":{"id":"n","finish_reason":{"type":"abort","message":"KVTransferError","status_code":500}}}`, true},
		{NativeFormat, `data: {"text":"a","output_ids":[1],"meta_info":{"id":"n","finish_reason":{"type":"abort","message":"no","status_code":400}}}`, false},
		{MessagesFormat, "event: error\ndata: " + `{"type":"error","error":{"type":"overloaded_error","message":"x"}}`, true},
		{MessagesFormat, "event: error\ndata: " + `{"type":"error","error":{"type":"invalid_request_error","message":"x"}}`, false},
		{ResponsesFormat, "event: error\ndata: " + `{"type":"error","sequence_number":3,"code":"500","message":"x"}`, true},
		{ResponsesFormat, "event: error\ndata: " + `{"type":"error","sequence_number":3,"code":"400","message":"x"}`, false},
		{ResponsesFormat, "event: response.failed\ndata: " + `{"type":"response.failed","sequence_number":3,"response":{}}`, true},
	} {
		tr := &Transcript{Format: k.form, holdsFailure: true}
		got := sentText(tr, k.event+"\n\n")
		if held := got == "" && tr.FailureEvent() != nil; held != k.held || !held && (got != k.event+"\n\n" || tr.Blocked() != "refused") {
			t.Errorf("%s: held %v, got %q, stuck %q", k.event, held, got, tr.Blocked())
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
		{"one event, delivered", event("a", "[1]", "1"), &no, "[1]", ""},
		{"one event, delivered new", event("a", "[1]", "1"), &yes, "[1]", ""},
		{"half a letter", event("a", "[1]", "1") + event("a", "[1,2]", "2"), nil, "[1 2]", "incomplete_character"},
		{"nonsense", event("a", "[1]", "1") + event("b", "[2]", "7"), nil, "[1]", "unreadable"},
		{"no ids", `data: {"text":"a","meta_info":{"id":"n","completion_tokens":1}}` + "\n\n", nil, "[]", ""},
	} {
		tr := &Transcript{Format: NativeFormat, ShowIDs: true, Deltas: k.deltas, Prompt: PackIDs([]uint32{7}), holdsFailure: true}
		sentText(tr, k.body)
		out, _ := json.Marshal(tr.Out)
		if got := strings.ReplaceAll(string(out), ",", " "); got != k.out && !(k.out == "[]" && got == "null") || tr.MigrationBlocker() != k.why {
			t.Errorf("%s: out %s, want %s; why %q, want %q", k.name, got, k.out, tr.MigrationBlocker(), k.why)
		}
	}
}

// For every sequence of events, nothing panics and nothing grows without bound; what is
// JSON stays JSON.
func FuzzFormats(f *testing.F) {
	for _, form := range []APIFormat{CompletionsFormat, ChatFormat} {
		f.Add(uint8(form)|128|64, choicesEvent(0, "a", "null", "[1]")+choicesEvent(2, "b", "null", "[2]"), choicesEvent(1, "c", `"length"`, "[3]")+choicesEvent(0, "d", `"stop"`, "[4]")+usageEvent+doneEvent)
	}
	for form, body := range formatStreams {
		f.Add(uint8(form), body, resumedStream)
		f.Add(uint8(form), body, body)
	}
	f.Fuzz(func(t *testing.T, form uint8, first, second string) {
		fm := APIFormat(form % 6)
		tr := &Transcript{Format: fm, ShowIDs: form&8 != 0, NoText: form&16 != 0, TextOnly: form&32 != 0, Logprobs: form&64 != 0, KeepText: form&64 != 0, Prompt: PackIDs([]uint32{7, 8}), holdsFailure: true}
		if form&128 != 0 {
			tr.Choices, tr.Limit = 3, 4
		}
		sentText(tr, first)
		if tr.Delivered > len(tr.Out) {
			t.Fatalf("delivered %d of %d", tr.Delivered, len(tr.Out))
		}
		tr.MigrationBlocker()
		if tr.TextOnly {
			tr.Out, tr.Delivered, tr.TextOnly = []uint32{1}, 1, false
		}
		tr.ensureExtras().failure = nil
		tr.getFormatter().event(nil, []byte(": comment\n\n"))
		tr.SwitchEngine()
		out := sentText(tr, second) + string(tr.AppendEnd(nil, true))
		for _, e := range strings.SplitAfter(second, "\n\n") {
			if data := sse.EventData([]byte(e)); len(data) > 0 && !bytes.Equal(data, sse.DoneData) && !json.Valid(data) {
				return
			}
		}
		for _, e := range strings.SplitAfter(first, "\n\n") {
			if data := sse.EventData([]byte(e)); len(data) > 0 && !bytes.Equal(data, sse.DoneData) && !json.Valid(data) {
				return
			}
		}
		for _, e := range strings.SplitAfter(out, "\n\n") {
			if data := sse.EventData([]byte(e)); len(data) > 0 && !bytes.Equal(data, sse.DoneData) && !json.Valid(data) {
				t.Fatalf("no JSON: %q", data)
			}
		}
	})
}

// TestNotResumableBeforeFirstEvent: a stream whose end repeats its first event cannot go on without it.
func TestNotResumableBeforeFirstEvent(t *testing.T) {
	for form, body := range formatStreams {
		tr := &Transcript{Format: form, Prompt: PackIDs([]uint32{7, 8}), TextOnly: true, holdsFailure: true}
		want := ""
		if form == MessagesFormat || form == ResponsesFormat {
			want = "incomplete_start"
		}
		if why := tr.MigrationBlocker(); why != want || tr.canMigrate() != (want == "") {
			t.Errorf("form %d: why %q, leaves %v", form, why, tr.canMigrate())
		}
		first, _, _ := strings.Cut(body, "\n\n")
		sentText(tr, first+"\n\n")
		if why := tr.MigrationBlocker(); why == "incomplete_start" {
			t.Errorf("form %d behind its first event: %q", form, why)
		}
	}
}

const usageEvent = `data: {"id":"cmpl-b","object":"text_completion","created":99,"model":"m","choices":[],"usage":{"prompt_tokens":999,"total_tokens":1099,"completion_tokens":100}}` + "\n\n"
