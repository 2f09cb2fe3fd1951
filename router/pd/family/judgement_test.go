package family

import "testing"

func TestEndsWithoutOutput(t *testing.T) {
	const (
		role  = `data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
		text  = `data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
		start = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n"
	)
	for seen, want := range map[string]bool{
		"":                                false,
		"0\r\n":                           false,
		"0\r\n\r\n":                       true,
		"91\r\n" + role + "\r\n":          false,
		"91\r\n" + role + "\r\n0\r\n\r\n": true,
		"91\r\n" + role + text[:20] + "\r\n0\r\n\r\n":                true,
		"91\r\n" + role + "\r\n20\r\n" + text[:20] + "\r\n0\r\n\r\n": true,
		"91\r\n" + role + "\r\n20\r\n" + text + "\r\n0\r\n\r\n":      false,
		"91\r\n" + start + "\r\n0\r\n\r\n":                           true,
		"91\r\ndata: [DONE]\n\n\r\n0\r\n\r\n":                        false,

		// Comments are not output.
		"8\r\n: ping\n\n\r\n0\r\n\r\n":                                    true,
		"a\r\n: ping\r\n\r\n\r\n0\r\n\r\n":                                true,
		"7\r\n: ping\n\r\n0\r\n\r\n":                                      true,
		"8\r\n: ping\n\n\r\n8;x=y\r\n: ping\n\n\r\n":                      false,
		"8\r\n: ping\n\n\r\n8\r\n: ping\n\n\r\n0\r\n\r\n":                 true,
		"4\r\n: pi\r\n4\r\nng\n\n\r\n0\r\n\r\n":                           false, // taken for an event
		"8\r\n: ping\n\n\r\n91\r\n" + role + "\r\n0\r\n\r\n":              true,
		"8\r\n: ping\n\n\r\n91\r\n" + text + "\r\n0\r\n\r\n":              false,
		"91\r\n: ping\n" + text + "\r\n0\r\n\r\n":                         false,
		"8\r\n: ping\n\n\r\n91\r\ndata: [DONE]\n\n\r\n0\r\n\r\n":          false,
		"a\r\n: [DONE]\n\n\r\n2\r\nda\r\n5\r\nta: 7\n\n\r\n0\r\n\r\n":     false,
		"8\r\n: ping\n\n\r\n10\r\nevent: ping\ndata: {}\n\n\r\n0\r\n\r\n": false,
		"91\r\ndata: [DONE]\n\r\n0\r\n\r\n":                               false,
		"91\r\ndata: {\"choices\":[]}\r\n\r\n\r\n0\r\n\r\n":               false,
		"91\r\ndata: 0\r\n\r\n":                                           false,
	} {
		if got := EndsWithoutOutput([]byte(seen)); got != want {
			t.Errorf("%q: %v", seen, got)
		}
	}
}

func TestInitialErrorStatus(t *testing.T) {
	const (
		role    = `data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
		text    = `data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
		failure = `data: {"error":{"message":"m","type":"InternalServerError","code":500}}` + "\n\n"
	)
	for _, c := range []struct {
		seen   string
		status int
		whole  bool
	}{
		{`data: {"id":"x","choices":[]}` + "\n\n", 0, true},
		{failure, 500, true},
		{failure[:40], 500, false},
		{"3a\r\n" + `data: {"error":{"message":"m","type":"BadRequestError","code":400}}` + "\n\n", 400, true},
		{`data: {"error":"m"}` + "\n\n", 500, true},
		{`data: {"error":"m"}` + "\r\n\r\n", 500, true},
		{"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\"}}\n\n", 500, true},
		{"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\"}}\n\n", 400, true},
		{"event: error\ndata: {\"type\":\"error\",\"sequence_number\":0,\"code\":\"503\"}\n\n", 503, true},
		{"event: error\ndata: {\"type\":\"error\",\"sequence_number\":0,\"code\":\"server_error\"}\n\n", 500, true},
		{"event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: error\ndata: {}\n\n", 0, true},

		{`data: {"object":"error","message":"m","type":"InternalServerError","param":null,"code":503}` + "\n\n", 503, true},

		{`data: { "error":{"message":"m","type":"InternalServerError","code":503}}` + "\n\n", 503, true},
		{`data: {"\u0065rror":{"message":"m","type":"InternalServerError","code":503}}` + "\n\n", 503, true},
		{`data: {"id":"x","error":{"message":"m","code":503}}` + "\n\n", 503, true},
		{`data: {"object":"err\u006fr","message":"m","code":503}` + "\n\n", 503, true},
		{`data: {"type":"error","error":{"type":"overloaded_error"}}` + "\n\n", 500, true},
		{`data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}],"error":null}` + "\n\n", 0, true},
		{`data: {"text":"","meta_info":{"finish_reason":{"message":"m","status_code":500,"type":"\u0061bort"}}}` + "\n\n", 500, true},

		// Comments are skipped.
		{": ping\n\n" + failure, 500, true},
		{"8\r\n: ping\n\n\r\n4f\r\n" + failure, 500, true},
		{": a\r\n\r\n: b\n\n" + role + failure, 500, true},
		{": ping\n" + failure, 500, true},
		{": ping\n\n" + text + failure, 0, true},
		{": ping\n\n", 0, false},
		{": ping", 0, false},

		// Events that only announce a response are skipped.
		{"91\r\n" + role + "\r\n", 0, false},
		{"91\r\n" + role + "\r\n4f\r\n" + failure, 500, true},
		{role + role + failure, 500, true},
		{`data: {"choices":[{"index":0,"delta":{"reasoning_content":null,"role":"assistant","content":""},"matched_stop":null}]}` + "\n\n" + failure, 500, true},
		{role + text + failure, 0, true},
		{role + "\r\n0\r\n\r\n", 0, true},
		{"0\r\n\r\n", 0, true},
		{`data: {"choices":[{"delta":{"role":"assistant","content":"","tool_calls":[{"index":0}]}}]}` + "\n\n" + failure, 0, true},
		{"event: message_start\ndata: {\"type\":\"message_start\"}\n\n", 0, false},
		{"event: message_start\ndata: {\"type\":\"message_start\"}\n\nevent: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n", 500, true},

		// SGLang's /generate.
		{`data: {"text":"","output_ids":[],"meta_info":{"id":"a","finish_reason":{"type":"abort","message":"KVTransferError","status_code":500,"err_type":"E"}}}` + "\n\n", 500, true},
		{`data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"bad","status_code":400}}}` + "\n\n", 400, true},
		{`data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"asked","status_code":null}}}` + "\n\n", 0, true},
		{`data: {"text":"a","meta_info":{"finish_reason":null}}` + "\n\n", 0, true},
		{`: keep-alive` + "\n\n" + failure, 500, true},
		{"", 0, false},
	} {
		if got := InitialErrorStatus([]byte(c.seen)); got != c.status {
			t.Errorf("%q: %d, want %d", c.seen, got, c.status)
		}
		if _, complete := FirstEvent([]byte(c.seen)); complete != c.whole {
			t.Errorf("%q: whole %v, want %v", c.seen, complete, c.whole)
		}
	}
}

func TestAbortedStatus(t *testing.T) {
	const (
		good    = `{"text":"a","meta_info":{"finish_reason":{"type":"stop"}}}`
		waiting = `{"text":"a","meta_info":{"finish_reason":null}}`
		asked   = `{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":null}}}`
		refused = `{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":400}}}`
		failed  = `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"KVTransferError(","status_code":500}}}`
	)
	for body, want := range map[string]int{
		"": 0, "[]": 0, "[": 0, good: 0, waiting: 0, asked: 0, refused: 400, failed: 500, " " + failed: 500,
		"[" + good + "," + failed + "]": 500, "[" + refused + "," + asked + "]": 0,
		"data: " + failed + "\n\ndata: [DONE]\n\n": 500, "data: " + good + "\n\n": 0,
	} {
		if got := AbortedStatus([]byte(body)); got != want {
			t.Errorf("%s: %d, want %d", body, got, want)
		}
	}
}
