package relay

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
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
		t.Errorf("prompt %v, out %v, told %d, stuck %q", tr.Prompt.Append(nil), tr.Out, tr.Delivered, tr.Blocked())
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

// What a movable stream's first event makes of it is kept, and nothing beside: there are
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

// migratorFunc is a Mover of a function.
type migratorFunc func(b Interruption) *upstream.Response

func (f migratorFunc) NextEngine(b Interruption) *upstream.Response { return f(b) }

// The seam lies behind the last token whose text is out whole.
func TestTranscriptStopsBeforePartialRune(t *testing.T) {
	for _, half := range []string{"", "\ufffd", `x\ufffd`} {
		tr := &Transcript{Format: ChatFormat}
		for _, e := range []string{fmt.Sprintf(roleEvent, "[1]"), idEvent("a", 2), idEvent("b", 3), idEvent(half, 4)} {
			tr.Event(nil, []byte(e))
		}
		if tr.Delivered != 2 || len(tr.Out) != 3 || tr.PartialRune != (half != "") {
			t.Errorf("after %q: told %d of %d, half %v", half, tr.Delivered, len(tr.Out), tr.PartialRune)
		}
		if tr.Event(nil, []byte(idEvent("c", 5))); tr.Delivered != 4 || tr.PartialRune {
			t.Errorf("after %q and a whole letter: told %d, half %v", half, tr.Delivered, tr.PartialRune)
		}
	}
}

// What an event can say that keeps another engine from going on.
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
			t.Errorf("the client is not told: %q", out)
		}
	}
}

// relayMigrated relays a stream of two engines to a client and gives its payload.
func relayMigrated(t *testing.T, tr *Transcript, usage bool, first, second string) (string, Result, []Interruption) {
	t.Helper()
	var breaks []Interruption
	var replaced []*upstream.Response
	next := func(b Interruption) *upstream.Response {
		b.Event = slices.Clone(b.Event)
		breaks = append(breaks, b)
		if second == "" || tr.Blocked() != "" {
			return nil
		}
		resp := open(t, engine(t, func(nc *net.TCPConn) { send(nc, streamHead+second) }), nil)
		replaced = append(replaced, resp)
		return resp
	}
	res, dst, _ := relayOnce(t, Options{Migration: Migration{Transcript: tr, IncludeUsage: usage, Next: migratorFunc(next)}}, func(nc *net.TCPConn) { send(nc, streamHead+first) })
	for _, resp := range replaced {
		resp.Release()
	}
	return payloadIn(t, dst.got, res.Reusable), res, breaks
}

// payloadIn takes the chunk framing off what a client got.
func payloadIn(t *testing.T, got []byte, whole bool) string {
	t.Helper()
	var chunks upstream.Chunks
	var payload []byte
	for at := 0; at < len(got); {
		n, p, err := chunks.Next(got[at:])
		if err != nil {
			t.Fatalf("the client's framing is broken: %v in %q", err, got)
		}
		payload, at = append(payload, p...), at+n
	}
	if whole && !chunks.Done() {
		t.Errorf("the body has no end: %q", got)
	}
	return string(payload)
}

func completionEvent(text, finish string, ids string) string {
	return `data: {"id":"cmpl-b","object":"text_completion","created":99,"model":"m","choices":[{"index":0,"text":"` + text +
		`","logprobs":null,"finish_reason":` + finish + `,"stop_reason":null,"prompt_token_ids":null,"token_ids":` + ids + "}]}\n\n"
}

func TestMigratedStreamIsContinuous(t *testing.T) {
	const failed = `data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","param":null,"code":500}}` + "\n\n"
	begin := chunksOf(fmt.Sprintf(roleEvent, "[1,2]"), idEvent("Hel", 3), idEvent("lo", 4))
	rest := chunksOf(strings.Replace(completionEvent(" you", "null", "[5]"), `"prompt_token_ids":null`, `"prompt_token_ids":[1,2,3,4]`, 1), completionEvent("", `"stop"`, "[0]"),
		`data: {"id":"cmpl-b","object":"text_completion","created":99,"model":"m","choices":[],"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`+"\n\n", doneEvent) + "0\r\n\r\n"
	const h = `data: {"id":"chatcmpl-a","object":"chat.completion.chunk","created":17,"model":"m","choices":[`
	want := fmt.Sprintf(roleEvent, "null") + plainEvent("Hel") + plainEvent("lo") +
		h + `{"index":0,"delta":{"content":" you"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n" +
		h + `{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null}]}` + "\n\n" +
		h + `],"usage":{"prompt_tokens":2,"total_tokens":6,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}` + "\n\n" + doneEvent
	for name, end := range map[string]string{
		"closed":        "",
		"half a chunk":  "7f\r\ndata: {\"id\"",
		"half an event": chunksOf("data: {\"id\":\"chatcm"),
		"bad framing":   "zz\r\n",
		"error event":   chunksOf(failed, doneEvent) + "0\r\n\r\n",
		"half a letter": chunksOf(idEvent("", 8)), // its token is made again
	} {
		wanted := want
		if name == "half a letter" {
			wanted = strings.Replace(want, plainEvent("lo"), plainEvent("lo")+plainEvent(""), 1)
		}
		tr := &Transcript{Format: ChatFormat}
		got, res, breaks := relayMigrated(t, tr, true, begin+end, rest)
		if got != wanted {
			t.Errorf("%s: got\n%s\nwant\n%s", name, got, wanted)
		}
		if len(breaks) != 1 || res.Cause != Completed || !res.Reusable || res.SawErrorEvent || res.Usage.Completion != 4 || res.Finish != "stop" {
			t.Errorf("%s: %+v, breaks %+v", name, res, breaks)
		}
		if !slices.Equal(tr.Out, []uint32{3, 4, 5, 0}) {
			t.Errorf("%s: out %v", name, tr.Out)
		}
	}
	// Nobody goes on: the client is told as without a Carry.
	got, res, _ := relayMigrated(t, &Transcript{Format: ChatFormat}, true, begin+chunksOf(failed), "")
	if want := fmt.Sprintf(roleEvent, "null") + plainEvent("Hel") + plainEvent("lo") + failed + doneEvent; got != want || !res.SawErrorEvent || !res.Reusable {
		t.Errorf("got %s, %+v", got, res)
	}
	got, res, _ = relayMigrated(t, &Transcript{Format: ChatFormat}, true, begin, "")
	if !strings.HasSuffix(got, doneEvent) || !strings.Contains(got, `"code":502`) || res.Cause != EngineClosed {
		t.Errorf("got %s, %+v", got, res)
	}
	// The answer was whole but for its last events.
	finish := strings.Replace(idEvent("", 0), `"finish_reason":null`, `"finish_reason":"stop"`, 1)
	got, res, breaks := relayMigrated(t, &Transcript{Format: ChatFormat}, true, begin+chunksOf(finish), rest)
	if !strings.HasSuffix(got, h+`],"usage":{"prompt_tokens":2,"total_tokens":5,"completion_tokens":3}}`+"\n\n"+doneEvent) || len(breaks) != 0 || res.Cause != Completed || !res.Reusable {
		t.Errorf("got %s, %+v", got, res)
	}
}

// TestMigratableChunkAllocatesNothing but the ids' own memory, which doubles.
func TestMigratableChunkAllocatesNothing(t *testing.T) {
	chunk := []byte(chunksOf(idEvent(" issues", 4711)))
	s := migratableStream()
	if n := testing.AllocsPerRun(1000, func() { s.forward(chunk, time.Now()) }); n != 0 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
	if tr := s.extras.migration.Transcript; len(tr.Out) < 1000 || tr.Blocked() != "" {
		t.Errorf("%d ids, stuck %q", len(tr.Out), tr.Blocked())
	}
}

func migratableStream() *stream {
	tr := &Transcript{Format: ChatFormat, holdsFailure: true, ChoiceState: apiformat.ChoiceState{Out: make([]uint32, 0, 1<<20)}}
	s := newDiscardStream()
	s.extras = &streamExtras{migration: Migration{Transcript: tr}}
	s.editor = &editor{rewriter: tr}
	s.forward([]byte(chunksOf(fmt.Sprintf(roleEvent, "[1]"), idEvent("a", 1), idEvent("b", 2))), time.Now())
	return s
}

// BenchmarkMigratableChunk is BenchmarkStreamChunk for a stream that may go on
// elsewhere.
func BenchmarkMigratableChunk(b *testing.B) {
	long := strings.Replace(chunkEvent, `"token_ids":null`, `"token_ids":[4711]`, 1)
	chunk := []byte(chunksOf(long))
	s := migratableStream()
	s.forward(chunk, time.Now())
	tr := s.extras.migration.Transcript
	b.ReportAllocs()
	b.SetBytes(int64(len(chunk)))
	for b.Loop() {
		if len(tr.Out) == cap(tr.Out) {
			tr.Out = tr.Out[:0]
		}
		if s.forward(chunk, time.Now()) {
			b.Fatal("ended")
		}
	}
}

// TestTranscriptsAreCounted: what a stream keeps for another engine takes memory of the budget.
// Where that is spent the stream goes on whole, keeps nothing more, and does not move.
func TestTranscriptsAreCounted(t *testing.T) {
	const events = 12000
	var first strings.Builder
	fmt.Fprintf(&first, roleEvent, "[1,2]")
	for i := range events {
		first.WriteString(idEvent("x", 1000+i%10))
	}
	for limit, want := range map[int64]string{1 << 20: "", 8 << 10: "memory"} {
		tr := &Transcript{Format: ChatFormat}
		budget := membudget.NewBudget(limit)
		var why []string
		next := migratorFunc(func(Interruption) *upstream.Response {
			why = append(why, tr.MigrationBlocker())
			return nil
		})
		res, dst, _ := relayOnce(t, Options{Migration: Migration{Transcript: tr, Next: next}, Budget: budget}, func(nc *net.TCPConn) { send(nc, streamHead+chunksOf(first.String())) })
		got := payloadIn(t, dst.got, res.Reusable)
		if n := strings.Count(got, `"content":"x"`); n != events || strings.Contains(got, `"token_ids":[`) {
			t.Errorf("limit %d: %d events of %d, or ids in them", limit, n, events)
		}
		if len(why) != 1 || why[0] != want {
			t.Errorf("limit %d: another engine cannot go on for %q; want %q", limit, why, want)
		}
		if want == "" && (budget.Peak() < 4*events || tr.Delivered != events) || want != "" && 4*cap(tr.Out) > uncountedKept+unbudgetedPartial {
			t.Errorf("limit %d: at most %d bytes were counted; room for %d ids is kept", limit, budget.Peak(), cap(tr.Out))
		}
		if budget.Used() != 0 {
			t.Errorf("limit %d: %d bytes are left counted", limit, budget.Used())
		}
	}
}
