package relay

import (
	"encoding/json"
	"fmt"
	"net"
	"sluice/dataplane/apiformat"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"strings"
	"sync/atomic"
	"testing"
)

// wholeEvents gives the first n whole events of a payload, all where n is -1.
func wholeEvents(payload string, n int) string {
	end := 0
	for at := 0; n != 0; n-- {
		i, mark := strings.Index(payload[at:], "\n\n"), 2
		if j := strings.Index(payload[at:], "\r\n\r\n"); i < 0 || j >= 0 && j < i {
			i, mark = j, 4
		}
		if i < 0 {
			break
		}
		at += i + mark
		end = at
	}
	return payload[:end]
}

// Half an event is not shown, however it came: an error event stands behind the last whole
// one. Where one chunk holds a whole event and half of another, a comment fills it.
func TestEngineDiesInEventAcrossChunks(t *testing.T) {
	const whole = "data: {\"choices\":[]}\n\n"
	for _, ev := range []string{"data: {}\n", "data: {\"choices\"", ": comm", "\r", "data: {}\n: more"} {
		for _, cut := range []int{0, 1, 2, 3, 4, 7, 8} {
			sent := chunksOf(whole) + chunksOf(ev)
			sent = sent[:len(sent)-min(cut, len(ev)+4)]
			res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+sent) })
			added, ok := strings.CutPrefix(string(dechunk(t, dst.got)), whole)
			if res.Cause != EngineClosed || !res.Reusable || !ok || !strings.HasPrefix(added, "data: {\"error\"") {
				t.Errorf("%q: %+v, got %q", sent, res, dst.got)
			}
			checkError(t, sse.OpenAI, added)
		}
	}
	for _, more := range []int{0, 1, 2, 3, 4, 100, 5000, maxPadding - 8, maxPadding, maxPadding + 1} {
		const half = "data: {}\n"
		sent := fmt.Sprintf("%x\r\n", len(whole+half)+more) + whole + half
		good := len(half)+more <= maxPadding
		res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+sent) })
		if !good {
			if res.Cause != EngineClosed || res.Reusable || !strings.HasPrefix(sent, string(dst.got)) || !strings.HasSuffix(string(dst.got), "\n\n") {
				t.Errorf("%d: %+v, got %.300q", more, res, dst.got)
			}
			continue
		}
		added, ok := strings.CutPrefix(string(dechunk(t, dst.got)), whole)
		if res.Cause != EngineClosed || !res.Reusable || !ok || !strings.HasPrefix(added, ":") {
			t.Errorf("%d: %+v, got %.300q", more, res, dst.got)
		}
		checkError(t, sse.OpenAI, wholeAfterPadding(added))
	}
	// Nothing but the ends of lines fits.
	for _, left := range []int{1, 2, 3} {
		sent := fmt.Sprintf("%x\r\n", len(whole)+left) + whole
		res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+sent) })
		added, ok := strings.CutPrefix(string(dechunk(t, dst.got)), whole)
		if !res.Reusable || !ok {
			t.Errorf("%d: %+v, got %q", left, res, dst.got)
		}
		checkError(t, sse.OpenAI, wholeAfterPadding(added))
	}
}

// wholeAfterPadding is what stands behind a comment, or empty lines, that fill a chunk.
func wholeAfterPadding(payload string) string {
	return strings.TrimLeft(payload, ": \n")
}

// An engine that dies behind any byte of a stream: the client gets the whole events that
// came, then a proper end with one error event in its protocol; behind the answer's last event
// none, and the stream is whole.
func TestEngineDiesAnywhere(t *testing.T) {
	for _, c := range captures {
		t.Run(c.file, func(t *testing.T) {
			noLeaks(t)
			body := framed(t, c.file)
			var at atomic.Int64
			e := engine(t, func(nc *net.TCPConn) { send(nc, streamHead+body[:at.Load()]) })
			t.Logf("reliability 5: %s: the engine dies at each of %d bytes", c.file, len(body))
			for cut := range body {
				at.Store(int64(cut))
				resp := open(t, e, nil)
				dst := new(recordingConn)
				res := Stream(dst, resp, Options{Protocol: c.protocol})
				resp.Release()
				payload, whole := string(dechunk(t, dst.got)), wholeEvents(payloadOf(body[:cut]), -1)
				before := scanAll(c.protocol, []byte(whole))
				if want := map[bool]Cause{true: Completed, false: EngineClosed}[before.Ended]; res.Cause != want || (res.Err == nil) != before.Ended || !res.Reusable {
					t.Fatalf("cut at %d: %+v, want %v, got %q", cut, res, want, dst.got)
				}
				after := scanAll(c.protocol, []byte(payload))
				if !strings.HasPrefix(payload, whole) || !after.Ended || after.Failed == before.Ended || strings.Count(payload, "[DONE]") > 1 {
					t.Fatalf("cut at %d: before %+v, after %+v, payload %q", cut, before, after, payload)
				}
				checkError(t, c.protocol, wholeAfterPadding(strings.TrimPrefix(payload, whole)))
			}
		})
	}
}

// payloadOf decodes as much of a chunked body as there is, by hand.
func payloadOf(body string) string {
	var out strings.Builder
	for {
		line, rest, ok := strings.Cut(body, "\r\n")
		var size int
		if _, err := fmt.Sscanf(line, "%x", &size); !ok || err != nil || size == 0 {
			return out.String()
		}
		out.WriteString(rest[:min(size, len(rest))])
		if size+2 > len(rest) {
			return out.String()
		}
		body = rest[size+2:]
	}
}

// checkError reads an error event as a client's library would.
func checkError(t *testing.T, p sse.Protocol, added string) {
	t.Helper()
	if added == "" {
		return
	}
	type inner struct {
		Message, Type string
		Param         *string
		Code          int
	}
	var name, data string
	events := strings.Split(strings.TrimSuffix(added, "\n\n"), "\n\n")
	for _, line := range strings.Split(events[0], "\n") {
		if v, ok := strings.CutPrefix(line, "event: "); ok {
			name = v
		}
		if v, ok := strings.CutPrefix(line, "data: "); ok {
			data = v
		}
	}
	switch p {
	case sse.OpenAI:
		var v struct{ Error inner }
		if err := json.Unmarshal([]byte(data), &v); err != nil || v.Error.Message == "" || v.Error.Type != "upstream_error" || v.Error.Code != 502 ||
			name != "" || len(events) != 2 || events[1] != "data: [DONE]" {
			t.Errorf("%q: %+v, %v", added, v, err)
		}
	case sse.Anthropic:
		var v struct {
			Type  string
			Error inner
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil || v.Type != "error" || v.Error.Type != "api_error" || v.Error.Message == "" || name != "error" || len(events) != 1 {
			t.Errorf("%q: %+v, %v", added, v, err)
		}
	case sse.Responses:
		var v struct{ Type, Code, Message string }
		if err := json.Unmarshal([]byte(data), &v); err != nil || v.Type != "error" || v.Code != "upstream_error" || v.Message == "" || name != "error" || len(events) != 1 {
			t.Errorf("%q: %+v, %v", added, v, err)
		}
	}
}

func TestEngineResets(t *testing.T) {
	noLeaks(t)
	sent := chunksOf("data: {}\n\n")
	arrived := make(chan struct{}, 10)
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, streamHead+sent)
		<-arrived
		_ = nc.SetLinger(0)
	})
	resp := open(t, e, nil)
	dst := &recordingConn{onWrite: func(*recordingConn) { arrived <- struct{}{} }}
	res := Stream(dst, resp, Options{})
	resp.Release()
	if res.Cause != EngineClosed || !res.Reusable || !strings.HasPrefix(string(dst.got), sent) {
		t.Errorf("%+v %q", res, dst.got)
	}
	checkError(t, sse.OpenAI, strings.TrimPrefix(string(dechunk(t, dst.got)), "data: {}\n\n"))
}

// Bad framing is the engine's death too: what is well framed before it goes on.
func TestEngineBreaksFraming(t *testing.T) {
	ev := chunksOf("data: {}\n\n")
	for _, c := range []struct {
		sent, passed string
		reusable     bool
	}{
		{ev + "zz\r\n", ev, true},
		{ev + "5 \r\nhello\r\n", ev, true},
		{ev + "5\t;x\r\nhello\r\n", ev, true},
		{ev + "5;" + strings.Repeat("x", 1000), "", true},
		{ev + "ffffffffffffffff\r\n", "", true},
		{ev[:len(ev)-2] + "XX", ev[:len(ev)-2], true},
		{ev + "1\n", ev[:len(ev)-2], true},
	} {
		res, dst, e := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+c.sent); waitClosed(nc) })
		if res.Cause != EngineMalformed || res.Reusable != c.reusable || !strings.HasPrefix(string(dst.got), c.passed) || !strings.Contains(string(dst.got), failures[EngineMalformed].Message) {
			t.Errorf("%.40q: %+v, got %q", c.sent, res, dst.got)
		}
		if c.reusable {
			dechunk(t, dst.got)
		}
		if s := e.Stats(); s.Open != 0 {
			t.Errorf("%.40q: %+v", c.sent, s)
		}
	}
}

// An engine that fails, and ends its framing well, does not leave its client with a silent end,
// whatever it had said. One whose answer is finished is whole without the last event too, where
// the protocol has finish reasons for all.
func TestEngineEndsEarly(t *testing.T) {
	const (
		role    = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
		token   = `data: {"choices":[{"delta":{"content":"a"}}]}` + "\n\n"
		finish  = `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}` + "\n\n"
		second  = `data: {"choices":[{"delta":{"content":"b"},"index":1}]}` + "\n\n"
		finish2 = `data: {"choices":[{"finish_reason":"stop","delta":{},"index":1}]}` + "\n\n"
		usage   = `data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}` + "\n\n"
		last    = "data: [DONE]\n\n"

		native      = `data: {"text":"a","output_ids":[1],"meta_info":{"id":"x","finish_reason":null},"index":1}` + "\n\n"
		nativeEnd   = `data: {"text":"a","output_ids":[1],"meta_info":{"finish_reason":{"type":"stop"}},"index":1}` + "\n\n"
		nativeFirst = `data: {"index":0,"text":"a","output_ids":[1],"meta_info":{"finish_reason":{"type":"stop"}}}` + "\n\n"

		start     = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"stop_reason\":null}}\n\n"
		delta     = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\"}\n\n"
		ended     = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n"
		stop      = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
		created   = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\"}}\n\n"
		text      = "event: response.output_text.delta\ndata: {}\n\n"
		completed = "event: response.completed\ndata: {\"response\":{\"status\":\"completed\"}}\n\n"
	)
	several := `data: {"choices":[{"index":0,"delta":{"content":"a"}},` + "\ndata: " + `{"index":1,"delta":{"content":"a"}}]}` + "\n\n"
	for name, c := range map[string]struct {
		protocol sse.Protocol
		choices  int
		sent     []string
		silent   bool
	}{
		"nothing behind content":          {sse.OpenAI, 0, []string{token, token}, false},
		"half an event behind it":         {sse.OpenAI, 0, []string{token, `data: {"choi`}, false},
		"finished without [DONE]":         {sse.OpenAI, 0, []string{token, finish}, true},
		"finished at once":                {sse.OpenAI, 0, []string{finish}, true},
		"finished, usage behind it":       {sse.OpenAI, 0, []string{token, finish, usage}, true},
		"an error event without [DONE]":   {sse.OpenAI, 0, []string{token, "data: {\"error\":{}}\n\n"}, true},
		"nothing":                         {sse.OpenAI, 0, nil, false},
		"a comment":                       {sse.OpenAI, 0, []string{": hi\n\n"}, false},
		"no content":                      {sse.OpenAI, 0, []string{"data: {}\n\n"}, false},
		"a role":                          {sse.OpenAI, 0, []string{role}, false},
		"a role and half a token":         {sse.OpenAI, 0, []string{role + token[:30]}, false},
		"[DONE] alone":                    {sse.OpenAI, 0, []string{last}, true},
		"two choices, one open":           {sse.OpenAI, 0, []string{token, second, finish}, false},
		"two choices, the other open":     {sse.OpenAI, 0, []string{token, second, finish2}, false},
		"two choices, one never seen":     {sse.OpenAI, 2, []string{token, finish}, false},
		"two choices, one finished twice": {sse.OpenAI, 0, []string{token, second, finish, finish}, false},
		"two choices":                     {sse.OpenAI, 2, []string{token, second, finish2, finish, usage}, true},
		"two choices, [DONE]":             {sse.OpenAI, 2, []string{token, finish, last}, true},
		"two choices, an event torn":      {sse.OpenAI, 0, []string{token, second, finish, second[:20]}, false},
		"/generate":                       {sse.OpenAI, 0, []string{native, nativeFirst}, false},
		"/generate, finished":             {sse.OpenAI, 0, []string{native, nativeFirst, nativeEnd}, true},
		"an event nobody reads":           {sse.OpenAI, 0, []string{token, several}, true},
		"one nobody reads, and more":      {sse.OpenAI, 0, []string{several, token}, false},
		"Messages without message_stop":   {sse.Anthropic, 0, []string{start, delta, ended}, false},
		"Messages, begun":                 {sse.Anthropic, 0, []string{start, delta[:50]}, false},
		"Messages, nothing":               {sse.Anthropic, 0, nil, false},
		"Messages":                        {sse.Anthropic, 0, []string{start, delta, ended, stop}, true},
		"Responses, no last event":        {sse.Responses, 0, []string{created, text}, false},
		"Responses, begun":                {sse.Responses, 0, []string{created, text[:20]}, false},
		"Responses, nothing":              {sse.Responses, 0, nil, false},
		"Responses":                       {sse.Responses, 0, []string{created, text, completed}, true},
		"Responses, cancelled":            {sse.Responses, 0, []string{created, "event: response.cancelled\ndata: {}\n\n"}, true},
	} {
		for _, edited := range []bool{false, true} {
			opt := Options{Protocol: c.protocol, Choices: c.choices}
			if edited {
				opt.Rewrite = redact.Rewriter{}
			}
			framed, payload := chunksOf(c.sent...), strings.Join(c.sent, "")
			sent := framed + "0\r\nA: b\r\n\r\n"
			for _, step := range []int{len(sent), len(framed) + 1, max(len(framed), 1), max(len(framed)-2, 1), 5} { // an event in more than maxEventParts reads is not held
				res, dst, _ := relayOnce(t, opt, func(nc *net.TCPConn) {
					send(nc, streamHead)
					for rest := sent; rest != ""; rest = rest[min(step, len(rest)):] {
						send(nc, rest[:min(step, len(rest))])
					}
					waitClosed(nc)
				})
				got := string(dechunk(t, dst.got))
				want := payload
				if !c.silent {
					want = wholeEvents(payload, -1)
				}
				added, ok := strings.CutPrefix(got, want)
				if res.SawErrorEvent && res.Cause == EngineReportedError {
					res.Cause = Completed
				}
				if want := map[bool]Cause{true: Completed, false: EngineIncomplete}[c.silent]; res.Cause != want || !res.Reusable || !ok || (added == "") != c.silent ||
					!c.silent && !strings.Contains(added, errIncomplete.Error()) {
					t.Errorf("%s, edited %v, by %d: %+v, got %q", name, edited, step, res, got)
				}
				checkError(t, c.protocol, wholeAfterPadding(added))
			}
		}
	}
}

// The end of an answer that lacks nothing but the end of a line is one.
func TestEngineEndsALineShort(t *testing.T) {
	for _, c := range []struct {
		protocol sse.Protocol
		sent     string
		silent   bool
	}{
		{sse.OpenAI, "data: [DONE]\n", true},
		{sse.OpenAI, "data: [DONE]", true},
		{sse.OpenAI, "data:[DONE]\r\n\r", true},
		{sse.OpenAI, "data: [DON", false},
		{sse.OpenAI, `data: {"choices":[{"finish_reason":"stop"}]}`, true},
		{sse.OpenAI, `data: {"choices":[{"finish_reason":"stop"}]`, false},
		{sse.OpenAI, `data: {"choices":[{"finish_reason":null}]}` + "\n", false},
		{sse.OpenAI, "data: {}\r\rdata: [DONE]\r\r", true},
		{sse.Anthropic, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n", true},
		{sse.Anthropic, "event: message_stop\ndata: {\"type\":\"message_st", false},
		{sse.Anthropic, "event: message_stop\n", false},
		{sse.Responses, "event: response.completed\ndata: {\"response\":{}}", true},
		{sse.Responses, "event: response.completed\ndata: {\"response\":{}", false},
	} {
		res, dst, _ := relayOnce(t, Options{Protocol: c.protocol}, func(nc *net.TCPConn) { send(nc, streamHead+chunksOf(c.sent)+sse.LastChunk); waitClosed(nc) })
		// The relay replaces a CR that ends a line by itself with LF.
		if got := string(dechunk(t, dst.got)); !res.Reusable || (res.Cause == Completed) != c.silent || (strings.ReplaceAll(got, "\n", "\r") == strings.ReplaceAll(c.sent, "\n", "\r")) != c.silent {
			t.Errorf("%q: %+v, got %q", c.sent, res, got)
		}
	}
}

// However many choices there are, all must finish.
func TestFinishReasons(t *testing.T) {
	for _, n := range []int{1, 2, 15, 16, 17, 100, apiformat.MaxChoiceIndex} {
		var f finishTracker
		f.expect(n)
		for i := range n {
			if f.all() {
				t.Fatalf("all of %d have finished behind %d", n, i)
			}
			f.add(n-1-i, false)
			f.add(n-1-i, true)
		}
		if !f.all() {
			t.Errorf("%+v: %d have finished", f, n)
		}
	}
	var f finishTracker
	f.add(-1, true)
	if !f.all() {
		t.Error("a choice without an index is not the first")
	}
	f.add(1<<40, false)
	f.expect(-1)
	if f.expect(1 << 40); f.all() || f.choices != apiformat.MaxChoiceIndex {
		t.Errorf("%+v", f)
	}
}

// An error event of the engine's own is passed on and not doubled.
func TestEngineErrorThenDeath(t *testing.T) {
	const ev = `data: {"error": {"message": "boom", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n"
	res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+chunksOf(ev)) })
	if payload := string(dechunk(t, dst.got)); payload != ev+"data: [DONE]\n\n" || !res.SawErrorEvent || !res.Reusable {
		t.Errorf("%+v %q", res, payload)
	}
}

// An engine's error is the stream's end: its type and code are passed on, and its text is not.
func TestEngineError(t *testing.T) {
	const finish = `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	long := strings.Repeat("x", maxErrorWord+1)
	for sent, c := range map[string]struct {
		protocol sse.Protocol
		err      string
	}{
		`data: {"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}`:                                 {sse.OpenAI, ": InternalServerError 500"},
		`data: {"object":"error","message":"boom","type":"BadRequestError","param":null,"code":400}`:                              {sse.OpenAI, ": BadRequestError 400"},
		`data: {"type":"error","error":{"code":"no_memory","type":null,"message":"boom"}}`:                                        {sse.OpenAI, ": no_memory"},
		`data: {"error":{"type":"boom, boom","code":500}}`:                                                                        {sse.OpenAI, ": 500"},
		`data: {"error":{"type":"` + long + `","code":{"boom":1}}}`:                                                               {sse.OpenAI, ""},
		finish + `data: {"error":"boom"}`:                                                                                         {sse.OpenAI, ""},
		finish + `data: {"error":{"message":"boom"}}`:                                                                             {sse.OpenAI, ""},
		`data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"boom"}}}`:                                       {sse.OpenAI, ": abort"},
		`event: error` + "\n" + `data: {"type":"error","error":{"type":"overloaded_error","message":"boom"}}`:                     {sse.Anthropic, ": overloaded_error"},
		`event: error` + "\n" + `data: {"type":"error","code":"server_error","message":"boom"}`:                                   {sse.Responses, ": server_error"},
		`event: error` + "\n" + `data: {"type":"error","error":{"code":"server_error","message":"boom"}}`:                         {sse.Responses, ": server_error"},
		`event: response.failed` + "\n" + `data: {"response":{"error":{"code":"rate_limit","message":"boom"},"status":"failed"}}`: {sse.Responses, ": rate_limit"},
		// Escapes hide nothing.
		`data: {"\u0065rror":{"message":"boom","ty\u0070e":"Internal\u0053erverError","code":500}}`:              {sse.OpenAI, ": InternalServerError 500"},
		`data: {"\u006Fbject":"err\u006Fr","message":"boom","type":"BadRequestError","code":400}`:                {sse.OpenAI, ": BadRequestError 400"},
		`data: {"text":"","meta\u005finfo":{"finish_reason":{"type":"\u0061bort","message":"boom"}}}`:            {sse.OpenAI, ": abort"},
		`data: {"t\u0079pe":"err\u006fr","error":{"type":"overloaded_error","message":"boom"}}`:                  {sse.Anthropic, ": overloaded_error"},
		`data: {"type":"response.f\u0061iled","response":{"\u0065rror":{"code":"rate_limit","message":"boom"}}}`: {sse.Responses, ": rate_limit"},
		`event: response.failed` + "\n" + `data: {"response":{"error":null}}`:                                    {sse.Responses, ": failed"},
	} {
		for _, opt := range []Options{{}, {Rewrite: &identityRewriter{}}} {
			opt.Protocol = c.protocol
			sent := sent + "\n\n"
			res, dst, _ := relayOnce(t, opt, func(nc *net.TCPConn) { send(nc, streamHead+chunksOf(sent)+sse.LastChunk); waitClosed(nc) })
			if got := string(dechunk(t, dst.got)); got != sent || res.Cause != EngineReportedError || !res.SawErrorEvent || !res.Reusable || res.Err == nil || res.Err.Error() != errEngineReported.Error()+c.err {
				t.Errorf("%q: %+v, got %q", sent, res, got)
			}
		}
	}
}

// No event is put into what is not an event stream.
func TestEngineDiesInJSON(t *testing.T) {
	for _, head := range []string{"Content-Type: application/json\r\n", "", "Content-Type: text/event-streams\r\n"} {
		for _, sent := range []string{"", chunksOf("{\"a\":\n\n")} {
			res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) {
				send(nc, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"+head+"\r\n"+sent)
			})
			if res.Cause != EngineClosed || res.Reusable || string(dst.got) != sent {
				t.Errorf("%q: %+v %q", head, res, dst.got)
			}
		}
	}
}
