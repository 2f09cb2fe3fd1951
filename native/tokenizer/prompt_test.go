//go:build cgo && linux

package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
)

func chatOf(t testing.TB, contents ...string) []byte {
	t.Helper()
	var messages []map[string]string
	for _, c := range contents {
		messages = append(messages, map[string]string{"role": "user", "content": c})
	}
	b, err := json.Marshal(map[string]any{"messages": messages, "add_generation_prompt": true})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestPrompt: one call gives what Render and Encode give, for inputs and parts on both sides of the
// length up to which a call runs on its caller's thread, from many threads at once.
func TestPrompt(t *testing.T) {
	m := load1(t, "testdata/tiny")
	long := strings.Repeat("0123456789abcdef", shortInput/16)
	repeat := "{% for i in range(40) %}{{ messages[0].content }}{% endfor %}" // a long text of a short input
	var wait sync.WaitGroup
	for i := range 24 { // more threads than may encode
		wait.Go(func() {
			for _, c := range []struct{ template, content string }{{"", "hi"}, {"", ""}, {"", long}, {repeat, long[:shortInput/20]}} {
				input := chatOf(t, c.content, fmt.Sprint(i))
				text, err := m.Render(nil, c.template, input)
				if err != nil {
					t.Error(err)
					return
				}
				for _, from := range []int{0, len(text) / 2, len(text) - 1, len(text)} {
					for _, special := range []bool{false, true} {
						want, err := m.Encode([]uint32{7}, text[from:], special)
						if err != nil {
							t.Error(err)
							return
						}
						calls := 0
						got, err := m.Prompt([]uint32{7}, c.template, input, special, func(rendered []byte) []byte {
							if calls++; !bytes.Equal(rendered, text) {
								t.Errorf("%d bytes of text, want the %d that Render gives", len(rendered), len(text))
							}
							return rendered[from:]
						})
						if err != nil || calls != 1 || !slices.Equal(got, want) {
							t.Errorf("%d bytes from %d: %d ids in %d calls (%v), want %d", len(text), from, len(got), calls, err, len(want))
						}
					}
				}
				if got, err := m.Prompt([]uint32{7}, c.template, input, true, func([]byte) []byte { return nil }); err != nil || !slices.Equal(got, []uint32{7}) {
					t.Errorf("nothing to encode gives %v, %v", got, err)
				}
			}
		})
	}
	wait.Wait()
}

func TestPromptErrors(t *testing.T) {
	m := load1(t, "testdata/tiny")
	never := func([]byte) []byte { t.Error("rest was called"); return nil }
	for _, input := range []string{"{", strings.Repeat(" ", shortInput+1)} {
		var e *Error
		if got, err := m.Prompt([]uint32{7}, "", []byte(input), false, never); !errors.As(err, &e) || e.Code != CodeInput || !slices.Equal(got, []uint32{7}) {
			t.Errorf("%d bytes that are not a request: %v, %v", len(input), got, err)
		}
	}
	m.Close()
	if _, err := m.Prompt(nil, "", chatOf(t, "x"), false, never); !errors.Is(err, ErrClosed) {
		t.Errorf("a closed model: %v, want ErrClosed", err)
	}
}
