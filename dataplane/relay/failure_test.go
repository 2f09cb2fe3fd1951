package relay

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
)

// goodCuts gives, for every prefix of a chunked body, whether the client can
// still get a proper end behind it: computed from the text, not by the parser.
// Every chunk of body must hold whole events only. What is not is where a chunk of
// several events is cut behind the first of them: its length is out.
func goodCuts(body string) []bool {
	good := make([]bool, len(body)+1)
	for i := range good {
		good[i] = true
	}
	for at := 0; ; {
		lineEnd := at + strings.Index(body[at:], "\r\n") + 2
		var size int
		fmt.Sscanf(body[at:lineEnd], "%x", &size)
		if size == 0 {
			return good
		}
		at = lineEnd + size
		for i := lineEnd + len(wholeEvents(body[lineEnd:at], 1)); i < at; i++ {
			good[i] = false
		}
		at += 2
	}
}

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
// one. Only where one chunk holds a whole event and half of another is nothing to be done.
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
			checkError(t, OpenAI, added)
		}
	}
	sent := chunksOf(whole + "data: {}\n")
	res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+sent) })
	if res.Cause != EngineClosed || res.Reusable || !strings.HasPrefix(sent, string(dst.got)) || !strings.HasSuffix(string(dst.got), "\n\n") {
		t.Errorf("%+v, got %q", res, dst.got)
	}
}

// An engine that dies behind any byte of a stream: the client gets the whole events that
// came, then either a proper end with one error event in its protocol, or, behind a part of
// a chunk, nothing more and no reuse.
func TestEngineDiesAnywhere(t *testing.T) {
	for _, c := range captures {
		t.Run(c.file, func(t *testing.T) {
			noLeaks(t)
			body := framed(t, c.file)
			good := goodCuts(body)
			var at atomic.Int64
			e := engine(t, func(nc *net.TCPConn) { send(nc, streamHead+body[:at.Load()]) })
			t.Logf("reliability 5: %s: the engine dies at each of %d bytes", c.file, len(body))
			for cut := range body {
				at.Store(int64(cut))
				resp := open(t, e, nil)
				dst := new(sink)
				res := Stream(dst, resp, Options{Protocol: c.protocol})
				resp.Release()
				if res.Cause != EngineClosed || res.Err == nil || res.Reusable != good[cut] {
					t.Fatalf("cut at %d: %+v, good %v, got %q", cut, res, good[cut], dst.got)
				}
				if !good[cut] {
					if !strings.HasPrefix(body[:cut], string(dst.got)) {
						t.Fatalf("cut at %d: got %q", cut, dst.got)
					}
					continue
				}
				payload, whole := string(dechunk(t, dst.got)), wholeEvents(payloadOf(body[:cut]), -1)
				before := scanAll(c.protocol, []byte(whole))
				after := scanAll(c.protocol, []byte(payload))
				if !strings.HasPrefix(payload, whole) || !after.Ended || after.Failed == before.Ended || strings.Count(payload, "[DONE]") > 1 {
					t.Fatalf("cut at %d: before %+v, after %+v, payload %q", cut, before, after, payload)
				}
				checkError(t, c.protocol, strings.TrimPrefix(payload, whole))
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
func checkError(t *testing.T, p Protocol, added string) {
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
	case OpenAI:
		var v struct{ Error inner }
		if err := json.Unmarshal([]byte(data), &v); err != nil || v.Error.Message == "" || v.Error.Type != "upstream_error" || v.Error.Code != 502 ||
			name != "" || len(events) != 2 || events[1] != "data: [DONE]" {
			t.Errorf("%q: %+v, %v", added, v, err)
		}
	case Anthropic:
		var v struct {
			Type  string
			Error inner
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil || v.Type != "error" || v.Error.Type != "api_error" || v.Error.Message == "" || name != "error" || len(events) != 1 {
			t.Errorf("%q: %+v, %v", added, v, err)
		}
	case Responses:
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
	dst := &sink{after: func(*sink) { arrived <- struct{}{} }}
	res := Stream(dst, resp, Options{})
	resp.Release()
	if res.Cause != EngineClosed || !res.Reusable || !strings.HasPrefix(string(dst.got), sent) {
		t.Errorf("%+v %q", res, dst.got)
	}
	checkError(t, OpenAI, strings.TrimPrefix(string(dechunk(t, dst.got)), "data: {}\n\n"))
}

// Bad framing is the engine's death too: what is well framed before it goes on.
func TestEngineBreaksFraming(t *testing.T) {
	ev := chunksOf("data: {}\n\n")
	for _, c := range []struct {
		sent, passed string
		reusable     bool
	}{
		{ev + "zz\r\n", ev, true},
		{ev + "5;" + strings.Repeat("x", 1000), "", true},
		{ev + "ffffffffffffffff\r\n", "", true},
		{ev[:len(ev)-2] + "XX", ev[:len(ev)-2], true},
		{ev + "1\n", ev[:len(ev)-2], true},
	} {
		res, dst, e := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+c.sent); untilGone(nc) })
		if res.Cause != EngineBroke || res.Reusable != c.reusable || !strings.HasPrefix(string(dst.got), c.passed) || !strings.Contains(string(dst.got), failures[EngineBroke].message) {
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

// An engine that fails in the middle and ends its framing well does not leave its client with
// a silent end. One whose answer is finished is whole without the last event too.
func TestEngineEndsEarly(t *testing.T) {
	const token = `data: {"choices":[{"delta":{"content":"a"}}]}` + "\n\n"
	const finish = `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	const delta = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\"}\n\n"
	for name, c := range map[string]struct {
		protocol Protocol
		rewrite  Rewriter
		sent     string
		silent   bool
	}{
		"nothing behind content":          {OpenAI, nil, chunksOf(token, token), false},
		"likewise, edited":                {OpenAI, Strip{}, chunksOf(token, token), false},
		"half an event behind it":         {OpenAI, nil, chunksOf(token, `data: {"choi`), false},
		"finished without [DONE]":         {OpenAI, nil, chunksOf(token, finish), true},
		"finished without [DONE], edited": {OpenAI, Strip{}, chunksOf(token, finish), true},
		"an error event without [DONE]":   {OpenAI, nil, chunksOf(token, "data: {\"error\":{}}\n\n"), true},
		"no content":                      {OpenAI, nil, chunksOf("data: {}\n\n"), true},
		"Messages without message_stop":   {Anthropic, nil, chunksOf(delta), false},
		"Messages, finished":              {Anthropic, nil, chunksOf(delta, "data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n"), true},
		"Responses, no last event":        {Responses, nil, chunksOf("event: response.output_text.delta\ndata: {}\n\n"), false},
	} {
		sent := c.sent + "0\r\nA: b\r\n\r\n"
		for _, step := range []int{len(sent), len(c.sent), len(c.sent) - 2} {
			res, dst, _ := relayOnce(t, Options{Protocol: c.protocol, Rewrite: c.rewrite}, func(nc *net.TCPConn) {
				send(nc, streamHead)
				for rest := sent; rest != ""; rest = rest[min(step, len(rest)):] {
					send(nc, rest[:min(step, len(rest))])
				}
				untilGone(nc)
			})
			payload := string(dechunk(t, dst.got))
			before, ok := strings.CutPrefix(payload, payloadOf(c.sent))
			if i := strings.LastIndex(payload, "\n\ndata: {\"error\":{\"message"); c.protocol == OpenAI && !c.silent && i >= 0 {
				before, ok = payload[i+2:], true
			}
			if want := map[bool]Cause{true: Completed, false: EngineEnded}[c.silent]; res.Cause != want || !res.Reusable || !ok || (before == "") != c.silent ||
				!c.silent && !strings.Contains(before, errBrokeOff.Error()) {
				t.Errorf("%s by %d: %+v, got %q", name, step, res, payload)
			}
			checkError(t, c.protocol, before)
		}
	}
}

// An error event of the engine's own is passed on and not doubled.
func TestEngineErrorThenDeath(t *testing.T) {
	const ev = `data: {"error": {"message": "boom", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n"
	res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+chunksOf(ev)) })
	if payload := string(dechunk(t, dst.got)); payload != ev+"data: [DONE]\n\n" || !res.EngineErr || !res.Reusable {
		t.Errorf("%+v %q", res, payload)
	}
}

// No event is put into what is no event stream.
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
