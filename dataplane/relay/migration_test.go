package relay

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/membudget"
	"sluice/dataplane/transcript"
	"sluice/dataplane/upstream"
)

// migratorFunc is a Migrator of a function.
type migratorFunc func(b Interruption) *upstream.Response

func (f migratorFunc) NextEngine(b Interruption) *upstream.Response { return f(b) }

// relayMigrated relays a stream of two engines to a client and gives its payload.
func relayMigrated(t *testing.T, tr *transcript.Transcript, usage bool, first, second string) (string, Result, []Interruption) {
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
		tr := &transcript.Transcript{Format: transcript.ChatFormat}
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
	// No engine continues: the client gets an error event, as without migration.
	got, res, _ := relayMigrated(t, &transcript.Transcript{Format: transcript.ChatFormat}, true, begin+chunksOf(failed), "")
	if want := fmt.Sprintf(roleEvent, "null") + plainEvent("Hel") + plainEvent("lo") + failed + doneEvent; got != want || !res.SawErrorEvent || !res.Reusable {
		t.Errorf("got %s, %+v", got, res)
	}
	got, res, _ = relayMigrated(t, &transcript.Transcript{Format: transcript.ChatFormat}, true, begin, "")
	if !strings.HasSuffix(got, doneEvent) || !strings.Contains(got, `"code":502`) || res.Cause != EngineClosed {
		t.Errorf("got %s, %+v", got, res)
	}
	// The answer was whole but for its last events.
	finish := strings.Replace(idEvent("", 0), `"finish_reason":null`, `"finish_reason":"stop"`, 1)
	got, res, breaks := relayMigrated(t, &transcript.Transcript{Format: transcript.ChatFormat}, true, begin+chunksOf(finish), rest)
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
	tr := &transcript.Transcript{Format: transcript.ChatFormat, ChoiceState: apiformat.ChoiceState{Out: make([]uint32, 0, 1<<20)}}
	tr.HoldFailure()
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
		tr := &transcript.Transcript{Format: transcript.ChatFormat}
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

// relayChoices relays a stream of n choices that a first engine begins and others go on with.
func relayChoices(t *testing.T, tr *transcript.Transcript, engines ...string) (got string, res Result, asked []string) {
	t.Helper()
	var opened []*upstream.Response
	next := func(b Interruption) *upstream.Response {
		var open []string
		for _, q := range tr.Unfinished() {
			open = append(open, fmt.Sprint(q.Index, " ", q.Out[:q.Delivered]))
		}
		asked = append(asked, fmt.Sprint(b.Cause, " ", strings.Join(open, ", ")))
		if len(opened)+1 >= len(engines) {
			return nil
		}
		body := engines[len(opened)+1]
		resp := openStream(t, body)
		opened = append(opened, resp)
		return resp
	}
	res, dst, _ := relayOnce(t, Options{Migration: Migration{Transcript: tr, IncludeUsage: true, Next: migratorFunc(next)}}, func(nc *net.TCPConn) { send(nc, streamHead+engines[0]) })
	for _, resp := range opened {
		resp.Release()
	}
	return payloadIn(t, dst.got, res.Reusable), res, asked
}

func openStream(t *testing.T, body string) *upstream.Response {
	return open(t, engine(t, func(nc *net.TCPConn) { send(nc, streamHead+body) }), nil)
}

const usageEvent = `data: {"id":"cmpl-b","object":"text_completion","created":99,"model":"m","choices":[],"usage":{"prompt_tokens":999,"total_tokens":1099,"completion_tokens":100}}` + "\n\n"

// TestChoicesResume: the choices that have not ended are asked for together, with the limit of
// the one that has the least left, and again; the client sees one stream.
func TestChoicesResume(t *testing.T) {
	tr := &transcript.Transcript{Choices: 3, Prompt: transcript.PackIDs([]uint32{1, 2}), Limit: 4}
	last := "0\r\n\r\n"
	got, res, asked := relayChoices(t, tr,
		chunksOf(choicesEvent(0, "a", "null", "[10]"), choicesEvent(1, "b", "null", "[20]"), choicesEvent(1, "B", `"stop"`, "[21]"), choicesEvent(2, "c", "null", "[30]"), choicesEvent(0, "A", "null", "[11]")),
		// Choices 0 and 2 as 0 and 1, with two tokens each: 0 is done, 2 is not.
		chunksOf(choicesEvent(1, "d", "null", "[31]"), choicesEvent(0, "e", "null", "[12]"), choicesEvent(1, "f", `"length"`, "[32]"), choicesEvent(0, "g", `"length"`, "[13]"), usageEvent, doneEvent)+last,
		chunksOf(choicesEvent(0, "h", `"length"`, "[33]"), usageEvent, doneEvent)+last)
	plain := func(index int, text, finish string) string { return choicesEvent(index, text, finish, "null") }
	want := plain(0, "a", "null") + plain(1, "b", "null") + plain(1, "B", `"stop"`) + plain(2, "c", "null") + plain(0, "A", "null") +
		choicesEventNoIDs(2, "d", "null") + choicesEventNoIDs(0, "e", "null") + choicesEventNoIDs(2, "f", "null") + choicesEventNoIDs(0, "g", `"length"`) +
		choicesEventNoIDs(2, "h", `"length"`) +
		`data: {"id":"cmpl-a","object":"text_completion","created":17,"model":"m","choices":[],"usage":{"prompt_tokens":2,"total_tokens":12,"completion_tokens":10}}` + "\n\n" + doneEvent
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if list := strings.Join(asked, "; "); list != "engine_closed 0 [10 11], 2 [30]; completed 2 [30 31 32]" || res.Cause != Completed || !res.Reusable || res.SawErrorEvent || res.Usage.Completion != 10 {
		t.Errorf("asked %s; %+v", list, res)
	}
}

// TestChoicesResumeBehindOpenEngine: an engine of a round that keeps its response open behind [DONE]
// does not delay the next round, and is not taken for a stalled one.
func TestChoicesResumeBehindOpenEngine(t *testing.T) {
	tr := &transcript.Transcript{Choices: 2, Prompt: transcript.PackIDs([]uint32{1, 2}), Limit: 4}
	rounds := []string{
		chunksOf(choicesEvent(0, "a", "null", "[10]"), choicesEvent(1, "b", "null", "[20]"), choicesEvent(0, "A", "null", "[11]")),
		chunksOf(choicesEvent(0, "c", `"length"`, "[12]"), choicesEvent(1, "d", "null", "[21]"), choicesEvent(0, "e", `"length"`, "[13]"), choicesEvent(1, "f", `"length"`, "[22]"), usageEvent, doneEvent),
		chunksOf(choicesEvent(0, "g", `"length"`, "[23]"), usageEvent, doneEvent),
	}
	var causes []string
	var opened []*upstream.Response
	next := func(b Interruption) *upstream.Response {
		causes = append(causes, b.Cause.String())
		if len(causes) == len(rounds) {
			return nil
		}
		body := rounds[len(causes)]
		resp := open(t, engine(t, func(nc *net.TCPConn) {
			send(nc, streamHead+body)
			waitClosed(nc)
		}), nil)
		opened = append(opened, resp)
		return resp
	}
	began := time.Now()
	opt := Options{Migration: Migration{Transcript: tr, IncludeUsage: true, Next: migratorFunc(next)}, IdleTimeout: time.Minute}
	res, dst, _ := relayOnce(t, opt, func(nc *net.TCPConn) { send(nc, streamHead+rounds[0]) })
	for _, resp := range opened {
		resp.Release()
	}
	if took := time.Since(began); took > lastGrace+2*time.Second {
		t.Errorf("it took %v", took)
	}
	if got := strings.Join(causes, " "); got != "engine_closed completed" || res.Cause != Completed || res.SawErrorEvent || res.Usage.Completion != 8 {
		t.Errorf("asked for engines after %s; %+v", got, res)
	}
	if got := payloadIn(t, dst.got, res.Reusable); strings.Count(got, doneEvent) != 1 || strings.Count(got, `"finish_reason":"length"`) != 2 {
		t.Errorf("got %s", got)
	}
}

// TestChoicesShareOnePrompt: cached_tokens is of the client's one prompt, whether the engine
// that was given one for each choice tells what it found of the first or of all together.
func TestChoicesShareOnePrompt(t *testing.T) {
	usage := func(cached int) string {
		return strings.Replace(usageEvent, `"completion_tokens":100`, fmt.Sprintf(`"completion_tokens":100,"prompt_tokens_details":{"cached_tokens":%d}`, cached), 1)
	}
	for _, k := range []struct {
		sums           bool
		reported, want int
	}{
		{false, 4, 4}, {false, 9, 6}, // what was reported before is output, although it was found
		{true, 8, 4}, {true, 12, 6}, {true, 18, 6}, {true, 0, 0},
	} {
		tr := &transcript.Transcript{Choices: 3, Prompt: transcript.PackIDs([]uint32{1, 2, 3, 4, 5, 6}), Limit: 2, SumsCached: k.sums}
		got, _, _ := relayChoices(t, tr,
			chunksOf(choicesEvent(0, "a", "null", "[10]"), choicesEvent(1, "b", "null", "[20]"), choicesEvent(2, "B", `"stop"`, "[21]")), // two are left
			chunksOf(choicesEvent(0, "d", `"length"`, "[31]"), choicesEvent(1, "e", `"length"`, "[12]"), usage(k.reported), doneEvent)+"0\r\n\r\n")
		if want := fmt.Sprintf(`"prompt_tokens_details":{"cached_tokens":%d}`, k.want); !strings.Contains(got, want) {
			t.Errorf("sums %v, %d reported: want %s in\n%s", k.sums, k.reported, want, got)
		}
	}
}

// choicesEventNoIDs is many without ids, as a Conversion writes it.
func choicesEventNoIDs(index int, text, finish string) string {
	return strings.Replace(strings.Replace(choicesEvent(index, text, finish, "null"), `,"prompt_token_ids":null,"token_ids":null`, "", 1), `"stop_reason":null`, `"stop_reason":null,"token_ids":null,"prompt_token_ids":null`, 1)
}

// TestChoicesWithoutNextEngine end with an error and a proper end; so do those whose engines never
// bring a choice to its end, after so many rounds.
func TestChoicesWithoutNextEngine(t *testing.T) {
	begin := chunksOf(choicesEvent(0, "a", "null", "[10]"), choicesEvent(1, "b", "null", "[20]"))
	short := chunksOf(choicesEvent(0, "c", `"length"`, "[11]"), choicesEvent(1, "d", `"length"`, "[21]"), usageEvent, doneEvent) + "0\r\n\r\n"
	got, res, asked := relayChoices(t, &transcript.Transcript{Choices: 2, Prompt: transcript.PackIDs([]uint32{1}), Limit: 1000}, begin, short)
	if !strings.HasSuffix(got, `"code":502}}`+"\n\n"+doneEvent) || strings.Contains(got, "usage") || !res.SawErrorEvent || !res.Reusable || len(asked) != 2 {
		t.Errorf("got %s, %+v, asked %q", got, res, asked)
	}
	engines := []string{begin}
	for range 50 {
		engines = append(engines, short)
	}
	if got, res, asked = relayChoices(t, &transcript.Transcript{Choices: 2, Prompt: transcript.PackIDs([]uint32{1}), Limit: 1000}, engines...); len(asked) != 2+maxExtraRounds || !res.SawErrorEvent || strings.Count(got, "[DONE]") != 1 {
		t.Errorf("%d asked, %+v", len(asked), res)
	}
}

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

// choicesEvent is an event of completions.
func choicesEvent(index int, text, finish, ids string) string {
	return fmt.Sprintf(`data: {"id":"cmpl-a","object":"text_completion","created":17,"model":"m","choices":[{"index":%d,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":null,"token_ids":%s}]}`+"\n\n", index, text, finish, ids)
}
