package harness

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/router/config"
)

// PromptWords returns a prompt of n words that depends on salt.
func PromptWords(n, salt int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "word%d ", (i*7+salt*131)%997)
	}
	return b.String()
}

// RequestForm is one of the forms in which a client can send the same request.
type RequestForm struct{ Name, Path, Body string }

// RequestForms returns a request for 12 output tokens in every form: chat and text completion, each
// streamed and not. The prompt depends on salt; extra is appended to the members of the body.
func RequestForms(salt int, extra string) []RequestForm {
	text, _ := json.Marshal(PromptWords(60, salt))
	chat := `{"model":"sim","messages":[{"role":"user","content":` + string(text) + `}],"max_tokens":12` + extra
	comp := `{"model":"sim","prompt":` + string(text) + `,"max_tokens":12` + extra
	return []RequestForm{
		{"chat", "/v1/chat/completions", chat + `}`},
		{"chat streamed", "/v1/chat/completions", chat + `,"stream":true,"stream_options":{"include_usage":true}}`},
		{"completions", "/v1/completions", comp + `}`},
		{"completions streamed", "/v1/completions", comp + `,"stream":true,"stream_options":{"include_usage":true}}`},
	}
}

// usage returns the prompt and completion tokens of a response, or of a stream's usage event.
func (a *Answer) usage(t *testing.T) [2]int {
	t.Helper()
	found := [2]int{-1, -1}
	for _, line := range strings.Split(string(a.Body), "\n") {
		var v struct {
			Usage *struct {
				P int `json:"prompt_tokens"`
				C int `json:"completion_tokens"`
			} `json:"usage"`
		}
		if json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), &v) == nil && v.Usage != nil {
			found = [2]int{v.Usage.P, v.Usage.C}
		}
	}
	return found
}

// WantSameAnswer checks that a response has the text and usage of want, the response of one
// engine that ran the whole request.
func WantSameAnswer(t *testing.T, what string, got, want *Answer) {
	t.Helper()
	if got.Status != 200 || got.Text(t) != want.Text(t) || want.Text(t) == "" || got.usage(t) != want.usage(t) {
		t.Errorf("%s: status %d\ntext  %q %v\nwant  %q %v\n%s", what, got.Status, got.Text(t), got.usage(t), want.Text(t), want.usage(t), got.Body)
	}
	if n := strings.Count(string(got.Body), "data: [DONE]"); strings.HasPrefix(got.Header.Get("Content-Type"), "text/event-stream") && n != 1 {
		t.Errorf("%s: %d times [DONE]", what, n)
	}
	for _, private := range []string{"encoded_opaque_state", "first_tok\"", "disagg_prefill_resp", "receiver_host", "remote_host"} {
		if strings.Contains(string(got.Body), private) {
			t.Errorf("%s: the client sees %s: %s", what, private, got.Body)
		}
	}
}

// UsingFamily returns a change to the configuration that selects a P/D family and chooses engines in
// turn.
func UsingFamily(name string) func(*config.Config) {
	return func(c *config.Config) {
		c.PD.Family = name
		c.Schedule.Policy = "round_robin"
	}
}

// AllOf returns one change to the configuration that applies fs in order. No element may be nil.
func AllOf(fs ...func(*config.Config)) func(*config.Config) {
	return func(c *config.Config) {
		for _, f := range fs {
			f(c)
		}
	}
}

// UsingPD returns options for a simulated engine: the P/D protocol that it implements and its role,
// prefill or decode.
func UsingPD(pd, r string) func(*sim.Options) {
	return func(o *sim.Options) { o.PD, o.Role = pd, r }
}
