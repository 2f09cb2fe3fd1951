package tokenize

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"sluice/dataplane/upstream"
)

// TestServerTemplate: what vLLM's GET /tokenizer_info answers (TokenizerInfo.to_dict), and what else may answer.
func TestServerTemplate(t *testing.T) {
	status, answer := 200, ""
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != "GET" || r.URL.Path != "/tokenizer_info" {
			t.Errorf("asked %s %s", r.Method, r.URL.Path)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, answer)
	}))
	defer s.Close()
	ep, err := upstream.NewEndpoint(s.URL, upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	for _, c := range []struct {
		status   int
		answer   string
		template string
		fails    bool
	}{
		{200, `{"tokenizer_class":"Qwen2Tokenizer","added_tokens_decoder":{"0":"x"},"chat_template":"{{ messages }}"}`, "{{ messages }}", false},
		{200, `{"tokenizer_class":"Qwen2Tokenizer"}`, "", false},
		{200, `{"chat_template":null}`, "", false},
		{200, `{"chat_template":{"default":"a","tool_use":"b"}}`, "", false},
		{404, `{"detail":"Not Found"}`, "", false},
		{405, ``, "", false},
		{500, `{"chat_template":"x"}`, "", true},
		{401, ``, "", true},
		{200, `<html>`, "", true},
		{200, `{"chat_template":"` + strings.Repeat("x", maxTemplate) + `"}`, strings.Repeat("x", maxTemplate), false},
		{200, `{"chat_template":"` + strings.Repeat("x", maxTemplate+1) + `"}`, "", true},
		{200, `{"chat_template":"x","more":"` + strings.Repeat("x", maxTokenizerInfo) + `"}`, "", true},
	} {
		status, answer = c.status, c.answer
		if template, err := ServerTemplate(ep); template != c.template || (err != nil) != c.fails {
			t.Errorf("%d %.60s: %.60q, %v", c.status, c.answer, template, err)
		}
	}
}
