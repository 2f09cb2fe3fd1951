package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"sluice/dataplane/upstream"
)

const (
	// maxTokenizerInfo bounds the answer in bytes: it lists all added tokens.
	maxTokenizerInfo = 8 << 20
	// maxTemplate bounds a chat template in bytes, as the tokenizer library does.
	maxTemplate = 1 << 20
	// infoTimeout is the timeout of the call.
	infoTimeout = 2 * time.Second
)

// ServerTemplate asks a vLLM engine for the chat template that it renders with, by the endpoint that
// --enable-tokenizer-info-endpoint adds (GET /tokenizer_info): that of --chat-template or else the
// tokenizer's own. It returns "" if the engine does not have the endpoint or has several templates,
// which are those of its folder. It may take infoTimeout.
func ServerTemplate(ep *upstream.Endpoint) (string, error) {
	req := upstream.Request{Method: "GET", Path: "/tokenizer_info", Deadline: time.Now().Add(infoTimeout)}
	resp, err := ep.Do(&req, nil)
	if err != nil {
		return "", &engineError{url: ep.URL(), cause: err}
	}
	defer resp.Release()
	answer, err := resp.ReadAll(nil, maxTokenizerInfo)
	switch {
	case err != nil:
		return "", &engineError{url: ep.URL(), status: resp.Status, cause: err}
	case resp.Status == 404 || resp.Status == 405:
		return "", nil
	case resp.Status != 200:
		return "", &engineError{url: ep.URL(), status: resp.Status, cause: errBusy}
	}
	var info struct {
		Template json.RawMessage `json:"chat_template"`
	}
	if err := json.Unmarshal(answer, &info); err != nil {
		return "", &engineError{url: ep.URL(), status: resp.Status, cause: errors.New("GET /tokenizer_info returned no JSON object")}
	}
	var template string
	if json.Unmarshal(info.Template, &template) != nil {
		return "", nil
	}
	if len(template) > maxTemplate {
		return "", &engineError{url: ep.URL(), cause: fmt.Errorf("its chat template has %d bytes; at most %d are used", len(template), maxTemplate)}
	}
	return template, nil
}
