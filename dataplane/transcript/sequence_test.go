package transcript

import (
	"fmt"
	"strings"
	"testing"
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

// A choice that an engine was not asked for belongs to no choice of the stream.
func TestUnrequestedChoiceBlocks(t *testing.T) {
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
