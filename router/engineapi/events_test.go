package engineapi

import (
	"bytes"
	"fmt"
	"io"
	"net/http/httputil"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/relay"
)

// convert returns the items of a stream's events as JSON, one per line.
func convert(t *testing.T, c converter, events ...string) string {
	t.Helper()
	var out []byte
	c.usage = noUsage
	c.send = func(it *item) error {
		js := jsonItems{}.append(nil, it)
		// Both encodings must be equivalent.
		packed := msgpackItems{}.append(nil, it)
		back := jsonOf(t, packed)
		if want := strings.TrimSpace(strings.TrimPrefix(string(js), "data: ")); back != want {
			t.Errorf("msgpack says %s\nJSON says    %s", back, want)
		}
		out = append(out, js...)
		return nil
	}
	o := itemWriter{converter: c}
	for _, e := range events {
		for i := range len(e) { // byte by byte, because events may be split anywhere
			if _, err := o.Write([]byte(e[i : i+1])); err != nil {
				t.Fatal(err)
			}
		}
	}
	return strings.TrimSuffix(strings.ReplaceAll(string(out), "\n\n", "\n"), "\n")
}

func data(js string) string { return "data: " + js + "\n\n" }

func TestConverter(t *testing.T) {
	const done = "data: [DONE]\n\n"
	for _, c := range []struct {
		name   string
		c      converter
		events []string
		want   string
	}{
		{"completions", converter{dialect: completions, eos: []byte("[2, 7]")}, []string{
			": keep-alive\n\n",
			data(`{"id":"c","choices":[{"index":0,"text":"","finish_reason":null,"prompt_token_ids":[1,2],"token_ids":[]}]}`),
			data(`{"id":"c","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[5,4294967295]}]}`),
			data(`{"id":"c","choices":[{"index":0,"text":"","finish_reason":"stop","stop_reason":7,"token_ids":[7]}]}`),
			data(`{"id":"c","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}`), done,
		}, `data: {"data":{"token_ids":[5,4294967295],"finish_reason":null,"index":0}}
data: {"data":{"token_ids":[7],"finish_reason":"eos","index":0,"stop_reason":7,"completion_usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}}}`},
		{"a stop string, two choices, no usage reported", converter{dialect: completions, prompt: 9}, []string{
			data(`{"choices":[{"index":0,"token_ids":[5],"finish_reason":"stop","stop_reason":"\n\"x"}]}`),
			data(`{"choices":[{"index":1,"token_ids":[6],"finish_reason":"length"}]}`), done,
		}, `data: {"data":{"token_ids":[5],"finish_reason":"stop","index":0,"stop_reason":"\n\"x"}}
data: {"data":{"token_ids":[6],"finish_reason":"length","index":1,"completion_usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}}`},
		{"log-probabilities of completions", converter{dialect: completions}, []string{
			data(`{"choices":[{"index":0,"token_ids":[5],"logprobs":{"tokens":["token_id:5"],"token_logprobs":[-0.25],"top_logprobs":[{"token_id:5":-0.25,"token_id:7":-3,"token_id:8":-2}]},"finish_reason":null}]}`),
		}, `data: {"data":{"token_ids":[5],"log_probs":[-0.25],"top_logprobs":[[{"rank":1,"token_id":5,"logprob":-0.25},{"rank":2,"token_id":8,"logprob":-2},{"rank":3,"token_id":7,"logprob":-3}]],"finish_reason":null,"index":0}}`},
		{"generate", converter{dialect: generate}, []string{
			data(`{"request_id":"g","choices":[{"index":0,"token_ids":[5],"logprobs":{"content":[{"token":"token_id:5","logprob":-1.5,"top_logprobs":[{"token":"ä","logprob":-3},{"token":"token_id:6","logprob":-0.5}]}]},"finish_reason":null}]}`),
			data(`{"request_id":"g","choices":[{"index":0,"token_ids":[],"finish_reason":"abort"}]}`), done,
		}, `data: {"data":{"token_ids":[5],"log_probs":[-1.5],"top_logprobs":[[{"rank":1,"token_id":6,"logprob":-0.5},{"rank":2,"token":"ä","logprob":-3}]],"finish_reason":null,"index":0}}
data: {"data":{"token_ids":[],"finish_reason":"cancelled","index":0,"completion_usage":{"prompt_tokens":0,"completion_tokens":1,"total_tokens":1}}}`},
		{"generate, log-probabilities by number (vLLM 0.32)", converter{dialect: generate}, []string{
			data(`{"request_id":"g","choices":[{"index":0,"token_ids":[5],"logprobs":{"content":[{"token_id":5,"logprob":-1.5,"rank":2,"top_logprobs":[{"token_id":5,"logprob":-1.5,"rank":2},{"token_id":0,"logprob":-0.5,"rank":1}]}]},"finish_reason":null}]}`),
		}, `data: {"data":{"token_ids":[5],"log_probs":[-1.5],"top_logprobs":[[{"rank":1,"token_id":0,"logprob":-0.5},{"rank":2,"token_id":5,"logprob":-1.5}]],"finish_reason":null,"index":0}}`},
		{"SGLang, all so far, not reported", converter{dialect: native}, []string{
			data(`{"text":"a","output_ids":[5],"meta_info":{"finish_reason":null,"prompt_tokens":4,"completion_tokens":1,"cached_tokens":2}}`),
			data(`{"text":"ab","output_ids":[5,6],"meta_info":{"finish_reason":null,"prompt_tokens":4,"completion_tokens":2,"cached_tokens":2,"output_token_logprobs":[[-1,5,null],[-2,6,"b"]]}}`),
			data(`{"text":"abc","output_ids":[5,6,7],"meta_info":{"finish_reason":{"type":"stop","matched":7},"prompt_tokens":4,"completion_tokens":3,"cached_tokens":2}}`), done,
		}, `data: {"data":{"token_ids":[5],"finish_reason":null,"index":0}}
data: {"data":{"token_ids":[6],"log_probs":[-2],"finish_reason":null,"index":0}}
data: {"data":{"token_ids":[7],"finish_reason":"eos","index":0,"stop_reason":7,"completion_usage":{"prompt_tokens":4,"completion_tokens":3,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}}}`},
		{"SGLang, deltas, not reported", converter{dialect: native, stops: []byte("[7]")}, []string{
			data(`{"output_ids":[5],"meta_info":{"finish_reason":null,"prompt_tokens":4,"completion_tokens":1}}`),
			data(`{"output_ids":[6],"meta_info":{"finish_reason":null,"prompt_tokens":4,"completion_tokens":2}}`),
			data(`{"output_ids":[7],"meta_info":{"finish_reason":{"type":"stop","matched":7},"prompt_tokens":4,"completion_tokens":3}}`), done,
		}, `data: {"data":{"token_ids":[5],"finish_reason":null,"index":0}}
data: {"data":{"token_ids":[6],"finish_reason":null,"index":0}}
data: {"data":{"token_ids":[7],"finish_reason":"stop","index":0,"stop_reason":7,"completion_usage":{"prompt_tokens":4,"completion_tokens":3,"total_tokens":7}}}`},
		{"SGLang, a transfer that failed", converter{dialect: native}, []string{
			data(`{"output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"KVTransferError","status_code":500},"prompt_tokens":4,"completion_tokens":0}}`), done,
		}, `data: {"event":"error","error":{"message":"KVTransferError","type":"upstream_error","param":null,"code":500},"comment":["KVTransferError"]}`},
		{"an error in the middle", converter{dialect: completions}, []string{
			data(`{"choices":[{"index":0,"token_ids":[5],"finish_reason":null}]}`),
			data(`{"error":{"message":"out of \"it\"","type":"InternalServerError","param":null,"code":500}}`), done,
		}, `data: {"data":{"token_ids":[5],"finish_reason":null,"index":0}}
data: {"event":"error","error":{"message":"out of \"it\"","type":"InternalServerError","param":null,"code":500},"comment":["out of \"it\""]}`},
	} {
		if got := convert(t, c.c, c.events...); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, c.want)
		}
	}
}

// testEvent is the event that vLLM 0.32 sends for one token.
func testEvent(d engineDialect) []byte {
	if d == native {
		return []byte(data(`{"text":" word","output_ids":[1234],"meta_info":{"id":"r-1","finish_reason":null,"prompt_tokens":400,"weight_version":"default","num_retractions":0,"reasoning_tokens":0,"completion_tokens":1,"cached_tokens":384,"cached_tokens_details":null,"dp_rank":null}}`))
	}
	return []byte(data(`{"id":"cmpl-r1","object":"text_completion","created":1763690000,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[1234]}]}`))
}

func steadyStream(d engineDialect, sink *[]byte) *itemWriter {
	o := &itemWriter{converter: converter{dialect: d, usage: noUsage, deltas: true, formKnown: true}, chunked: true}
	o.send = func(it *item) error {
		*sink = msgpackItems{}.append((*sink)[:0], it)
		return nil
	}
	return o
}

func chunk(event []byte) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(event), event) }

func TestItemsDoNotAllocate(t *testing.T) {
	for _, d := range []engineDialect{completions, generate, native} {
		var out []byte
		o, p := steadyStream(d, &out), chunk(testEvent(d))
		if n := testing.AllocsPerRun(1000, func() {
			if _, err := o.Write(p); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("dialect %d: %v allocations an item", d, n)
		}
		if !bytes.Contains(out, msgp.AppendUint32(nil, 1234)) {
			t.Errorf("dialect %d: %x", d, out)
		}
	}
}

// TestSSEWriter: items are written in the framing of the stream, complete and with one end,
// wherever the engine's data is split, and without allocation.
func TestSSEWriter(t *testing.T) {
	events := []string{string(testEvent(completions)), string(testEvent(completions)),
		data(`{"id":"c","choices":[{"index":0,"text":"","finish_reason":"length","token_ids":[7]}]}`),
		data(`{"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6}}`), "data: [DONE]\n\n"}
	item := func(ids, finish, usage string) string {
		return `data: {"data":{"token_ids":[` + ids + `],"finish_reason":` + finish + `,"index":0` + usage + "}}\n\n"
	}
	want := item("1234", "null", "") + item("1234", "null", "") + item("7", `"length"`, `,"completion_usage":{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6}`) + "data: [DONE]\n\n"
	failed := `data: {"event":"error","error":{"message":"the engine closed the connection before the end of the stream","type":"upstream_error","param":null,"code":502},"comment":["the engine closed the connection before the end of the stream"]}` + "\n\ndata: [DONE]\n\n"
	whole := ""
	for _, e := range events {
		whole += string(chunk([]byte(e)))
	}
	whole += "0\r\n\r\n"
	through := func(e *sseWriter, p string, size int) (out string) {
		for len(p) > 0 {
			n := min(size, len(p))
			b, err := e.Convert([]byte(p[:n]))
			if err != nil {
				t.Fatal(err)
			}
			out, p = out+string(b), p[n:]
		}
		return out
	}
	fresh := func(chunked bool) *sseWriter {
		return newSSEWriter(converter{dialect: completions, usage: noUsage}, chunked)
	}
	for size := 1; size < len(whole); size = size*2 + 1 {
		e := fresh(true)
		got := through(e, whole, size)
		if body, err := io.ReadAll(httputil.NewChunkedReader(strings.NewReader(got))); err != nil || string(body) != want {
			t.Fatalf("pieces of %d: %v in %q\nwant %q", size, err, got, want)
		}
		if more := string(e.End(relay.EngineClosed)); more != "" {
			t.Errorf("pieces of %d: %q behind the end", size, more)
		}
		if got := through(fresh(false), strings.Join(events, ""), size); got != want {
			t.Errorf("without framing, pieces of %d: %q\nwant %q", size, got, want)
		}
	}
	first := len(chunk([]byte(events[0])))
	for cut, want := range map[int]string{first: item("1234", "null", "") + failed, first + 20: item("1234", "null", "") + failed, 3 * first / 2: item("1234", "null", "") + failed, 5: failed} {
		e := fresh(true)
		got := through(e, whole[:cut], 1000) + string(e.End(relay.EngineClosed))
		if body, err := io.ReadAll(httputil.NewChunkedReader(strings.NewReader(got))); err != nil || string(body) != want {
			t.Errorf("an engine that leaves at byte %d: %v in %q\nwant %q", cut, err, got, want)
		}
	}
	for _, d := range []engineDialect{completions, native} {
		e, p := newSSEWriter(converter{dialect: d, usage: noUsage, deltas: true, formKnown: true}, true), chunk(testEvent(d))
		if n := testing.AllocsPerRun(1000, func() {
			if out, err := e.Convert(p); err != nil || !bytes.Contains(out, []byte("[1234]")) {
				t.Fatal(string(out), err)
			}
		}); n != 0 {
			t.Errorf("dialect %d: %v allocations an event", d, n)
		}
	}
}

// BenchmarkItem measures the router's work for one item without sockets: it decodes the relay's
// chunk, parses the event and writes the item.
func BenchmarkItem(b *testing.B) {
	for _, d := range []engineDialect{completions, native} {
		b.Run(endpoints[d].Path, func(b *testing.B) {
			var out []byte
			o, p := steadyStream(d, &out), chunk(testEvent(d))
			b.ReportAllocs()
			for b.Loop() {
				_, _ = o.Write(p)
			}
		})
	}
	b.Run("record", func(b *testing.B) {
		var out []byte
		o := steadyStream(generate, &out)
		o.idRecords = true
		p := chunk([]byte("\x00\x01\x00\x00\x00\xd2\x04\x00\x00"))
		b.ReportAllocs()
		for b.Loop() {
			_, _ = o.Write(p)
		}
	})
}

// TestTemplateMatchesFullParse: a converter with the template produces the same items as one
// that walks every event, whether an event matches the template or not.
func TestTemplateMatchesFullParse(t *testing.T) {
	event := func(text, ids, rest string) string {
		return data(`{"id":"c","choices":[{"index":0,"text":"` + text + `","finish_reason":null,"token_ids":[` + ids + `]}]` + rest + `}`)
	}
	events := []string{
		event("a", "1", ""), event("b", "2", ""), event("c", "3", ""), event(`\"],\"token_ids\":[9`, "4, 5", ""), event(`x\\`, "6", ""),
		event("d", "", ""), event("e", "7", `,"usage":{"prompt_tokens":3}`), event("f", "4294967296", ""), event("g", "8", ""),
		data(`{"id":"c","choices":[{"index":1,"text":"h","finish_reason":null,"token_ids":[9]}]}`), event("", "10", ""),
		data(`{"id":"c","choices":[{"index":0,"text":"i","finish_reason":"length","token_ids":[11]}]}`), "data: [DONE]\n\n",
	}
	var walked []string
	c := converter{dialect: completions, usage: noUsage}
	c.send = func(it *item) error { walked = append(walked, string(jsonItems{}.append(nil, it))); return nil }
	for _, e := range events {
		c.eventTemplate = eventTemplate{}
		if err := c.handleEvent([]byte(e)); err != nil {
			t.Fatal(err)
		}
	}
	want := strings.TrimSuffix(strings.ReplaceAll(strings.Join(walked, ""), "\n\n", "\n"), "\n")
	if got := convert(t, converter{dialect: completions}, events...); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if len(walked) != 10 {
		t.Errorf("%d items", len(walked))
	}
}
