package relay

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/upstream"
)

// TestShownTokensAreNotRepeated: a token whose log-probability the client has seen, but
// not its text, could come out as another.
func TestShownTokensAreNotRepeated(t *testing.T) {
	half := `data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"logprobs":{"content":[{"token":"","logprob":-1,"bytes":[]}]},"finish_reason":null,"token_ids":[9]}]}` + "\n\n"
	for scores, want := range map[bool]string{false: "", true: "incomplete_character"} {
		tr := &Transcript{Format: ChatFormat, Logprobs: scores, holdsFailure: true}
		sentText(tr, fmt.Sprintf(roleEvent, "[1,2]")+idEvent("Hi", 3)+half)
		if why := tr.MigrationBlocker(); why != want || tr.canMigrate() {
			t.Errorf("scores %v: why %q, want %q; leaves %v", scores, why, want, tr.canMigrate())
		}
		sentText(tr, idEvent("ü", 10))
		if why := tr.MigrationBlocker(); why != "" || !tr.canMigrate() || len(tr.Out) != 3 {
			t.Errorf("scores %v: why %q behind the character", scores, why)
		}
	}
}

// choicesEvent is an event of completions.
func choicesEvent(index int, text, finish, ids string) string {
	return fmt.Sprintf(`data: {"id":"cmpl-a","object":"text_completion","created":17,"model":"m","choices":[{"index":%d,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":null,"token_ids":%s}]}`+"\n\n", index, text, finish, ids)
}

// relayChoices relays a stream of n choices that a first engine begins and others go on with.
func relayChoices(t *testing.T, tr *Transcript, engines ...string) (got string, res Result, asked []string) {
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
	tr := &Transcript{Choices: 3, Prompt: PackIDs([]uint32{1, 2}), Limit: 4}
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
	tr := &Transcript{Choices: 2, Prompt: PackIDs([]uint32{1, 2}), Limit: 4}
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
		{false, 4, 4}, {false, 9, 6}, // what was told before is output, though it was found
		{true, 8, 4}, {true, 12, 6}, {true, 18, 6}, {true, 0, 0},
	} {
		tr := &Transcript{Choices: 3, Prompt: PackIDs([]uint32{1, 2, 3, 4, 5, 6}), Limit: 2, SumsCached: k.sums}
		got, _, _ := relayChoices(t, tr,
			chunksOf(choicesEvent(0, "a", "null", "[10]"), choicesEvent(1, "b", "null", "[20]"), choicesEvent(2, "B", `"stop"`, "[21]")), // two are left
			chunksOf(choicesEvent(0, "d", `"length"`, "[31]"), choicesEvent(1, "e", `"length"`, "[12]"), usage(k.reported), doneEvent)+"0\r\n\r\n")
		if want := fmt.Sprintf(`"prompt_tokens_details":{"cached_tokens":%d}`, k.want); !strings.Contains(got, want) {
			t.Errorf("sums %v, %d told: want %s in\n%s", k.sums, k.reported, want, got)
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
	got, res, asked := relayChoices(t, &Transcript{Choices: 2, Prompt: PackIDs([]uint32{1}), Limit: 1000}, begin, short)
	if !strings.HasSuffix(got, `"code":502}}`+"\n\n"+doneEvent) || strings.Contains(got, "usage") || !res.SawErrorEvent || !res.Reusable || len(asked) != 2 {
		t.Errorf("got %s, %+v, asked %q", got, res, asked)
	}
	engines := []string{begin}
	for range 50 {
		engines = append(engines, short)
	}
	if got, res, asked = relayChoices(t, &Transcript{Choices: 2, Prompt: PackIDs([]uint32{1}), Limit: 1000}, engines...); len(asked) != 2+maxExtraRounds || !res.SawErrorEvent || strings.Count(got, "[DONE]") != 1 {
		t.Errorf("%d asked, %+v", len(asked), res)
	}
	// A choice that an engine was not asked for is nobody's.
	second := &Transcript{Choices: 2, Prompt: PackIDs([]uint32{1}), holdsFailure: true}
	sentText(second, choicesEvent(0, "a", `"stop"`, "[5]")+choicesEvent(1, "b", "null", "[6]"))
	second.SwitchEngine()
	if got := sentText(second, choicesEvent(1, "x", "null", "[7]")+choicesEvent(0, "y", "null", "[8]")); strings.Contains(got, `"x"`) || !strings.Contains(got, `"index":1,"text":"y"`) || second.Blocked() != "multiple_choices" {
		t.Errorf("got %s, stuck %q", got, second.Blocked())
	}
	tr := &Transcript{Choices: 2, Prompt: PackIDs([]uint32{1}), holdsFailure: true}
	sentText(tr, choicesEvent(2, "x", "null", "[5]"))
	if tr.Blocked() != "multiple_choices" {
		t.Errorf("stuck %q", tr.Blocked())
	}
}
