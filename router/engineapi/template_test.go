package engineapi

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// converted returns a converter's items for a stream's events, one per line. walked disables
// the template, so that the converter walks every event.
func converted(d engineDialect, deltas, known, walked bool, events [][]byte) string {
	var out []byte
	c := converter{dialect: d, usage: noUsage, prompt: 3, deltas: deltas, formKnown: known, eos: []byte("[7]")}
	c.send = func(it *item) error {
		out = jsonItems{}.append(out, it)
		return nil
	}
	for _, e := range events {
		if walked {
			c.eventTemplate = eventTemplate{}
		}
		// A copy with spare capacity, as in the read buffers of streams.
		if err := c.handleEvent(append(make([]byte, 0, len(e)+16), e...)); err != nil {
			return err.Error()
		}
		out = fmt.Appendf(out, "%v %d\n", c.usage, c.outputTokens)
	}
	return string(out)
}

// sglangStream returns the events that SGLang 0.5.23 streams for a number of tokens.
func sglangStream(tokens int, cumulative bool) (events [][]byte) {
	var text strings.Builder
	var ids []string
	for i := range tokens {
		if !cumulative {
			text.Reset()
			ids = ids[:0]
		}
		fmt.Fprintf(&text, " w%d", i)
		ids = append(ids, fmt.Sprint(1000+i*i))
		events = append(events, fmt.Appendf(nil, "data: {\"text\":%q,\"output_ids\":[%s],\"meta_info\":{\"id\":\"5ab0\",\"finish_reason\":null,\"prompt_tokens\":400,\"weight_version\":\"default\",\"num_retractions\":0,\"reasoning_tokens\":0,\"completion_tokens\":%d,\"cached_tokens\":384,\"weight_versions\":[{\"version\":\"default\",\"start\":0,\"end\":%d}],\"cached_tokens_details\":null,\"dp_rank\":null}}\n\n",
			text.String(), strings.Join(ids, ","), i+1, i+1))
	}
	return append(events,
		fmt.Appendf(nil, "data: {\"text\":%q,\"output_ids\":[%s],\"meta_info\":{\"id\":\"5ab0\",\"finish_reason\":{\"type\":\"length\",\"length\":%d},\"prompt_tokens\":400,\"completion_tokens\":%d,\"cached_tokens\":384}}\n\n", text.String(), strings.Join(ids, ","), tokens, tokens),
		[]byte("data: [DONE]\n\n"))
}

// TestTemplateOfNative: SGLang's streams, cumulative or with deltas, produce the same items
// with and without the template, and the template matches nearly all of their events.
func TestTemplateOfNative(t *testing.T) {
	for _, cumulative := range []bool{false, true} {
		for _, known := range []bool{false, true} {
			events := sglangStream(40, cumulative)
			got := converted(native, !cumulative, known, false, events)
			if want := converted(native, !cumulative, known, true, events); got != want {
				t.Errorf("cumulative %v, known %v: got\n%swalked\n%s", cumulative, known, got, want)
			}
			if n := strings.Count(got, `"token_ids":[`); n != 41 { // the last one is empty in a cumulative stream
				t.Errorf("cumulative %v, known %v: %d items", cumulative, known, n)
			}
			c := converter{dialect: native, usage: noUsage, deltas: !cumulative, formKnown: true, send: func(*item) error { return nil }}
			taken := 0
			for _, e := range events[:40] {
				if done, _ := c.readNativeTemplate(bytes.TrimSpace(e[len("data: "):])); done {
					taken++
				} else if err := c.handleEvent(e); err != nil {
					t.Fatal(err)
				}
			}
			if taken != 39 {
				t.Errorf("cumulative %v: the template took %d of 40 events", cumulative, taken)
			}
		}
	}
}

// TestLongEvents: an event of a cumulative stream grows beyond the size of one read.
func TestLongEvents(t *testing.T) {
	tokens := 0
	o := &itemWriter{converter: converter{dialect: native, usage: noUsage, formKnown: true}}
	o.send = func(it *item) error {
		if it.failure != nil {
			t.Fatal(it.failure.message)
		}
		tokens += len(it.tokens)
		return nil
	}
	defer o.events.Release()
	for _, n := range []int{1, 20_000} {
		event := data(`{"output_ids":[1` + strings.Repeat(",12345", n) + `],"meta_info":{"completion_tokens":` + fmt.Sprint(n+1) + `}}`)
		for piece := range slices.Chunk([]byte(event), 32<<10) {
			if _, err := o.Write(piece); err != nil {
				t.Fatal(err)
			}
		}
	}
	if tokens != 20_001 {
		t.Errorf("%d tokens", tokens)
	}
}

// FuzzTemplate: the template does not change the items, whatever the events are. Events are
// lines; mode selects the dialect and what is known about a native stream.
func FuzzTemplate(f *testing.F) {
	lines := func(events [][]byte) (all []byte) {
		for _, e := range events {
			all = append(append(all, bytes.TrimSpace(bytes.TrimPrefix(e, []byte("data: ")))...), '\n')
		}
		return all
	}
	for mode := range uint8(8) {
		f.Add(lines(sglangStream(4, mode&1 != 0)), mode|4)
	}
	f.Add([]byte(`{"id":"c","created":1,"choices":[{"index":0,"text":"a","finish_reason":null,"token_ids":[1]}]}
{"id":"c","created":2,"choices":[{"index":0,"text":"b","finish_reason":null,"token_ids":[2]}]}
{"id":"c","created":2,"choices":[{"index":1,"text":"b","finish_reason":null,"token_ids":[3, 4]}]}
{"id":"c","created":2,"choices":[{"index":0,"text":"\q","finish_reason":null,"token_ids":[5]}]}
{"id":"c","created":3,"choices":[{"index":0,"text":"b","finish_reason":null,"token_ids":[6]}],"usage":{"prompt_tokens":3}}
{"id":"c","created":3,"choices":[{"index":0,"text":"b","finish_reason":null,"token_ids":[6]}],"usage":{"prompt_tokens":4}}
[DONE]`), uint8(0))
	f.Add([]byte(`{"output_ids":[1],"meta_info":{"prompt_tokens":"5","completion_tokens":1}}
{"output_ids":[1,2],"meta_info":{"prompt_tokens":6,"completion_tokens":2}}
{"output_ids":[1,2],"meta_info":{"prompt_tokens":6,"completion_tokens":2}}
{"output_ids":[1,2,3],"meta_info":{"prompt_tokens":6,"completion_tokens":3},"index":1}
{"output_ids":[1,2,3,4],"meta_info":{"prompt_tokens":6,"completion_tokens":4},"index":1025}`), uint8(7))
	f.Fuzz(func(t *testing.T, all []byte, mode uint8) {
		var events [][]byte
		for line := range bytes.Lines(all) {
			if bytes.IndexByte(line, '\r') >= 0 {
				return
			}
			events = append(events, fmt.Appendf(nil, "data: %s\n\n", bytes.TrimRight(line, "\n")))
		}
		d := [...]engineDialect{completions, native, generate, native}[mode>>2&3]
		got := converted(d, mode&1 == 0, mode&2 != 0, false, events)
		if want := converted(d, mode&1 == 0, mode&2 != 0, true, events); got != want {
			t.Errorf("got\n%swalked\n%s", got, want)
		}
	})
}
