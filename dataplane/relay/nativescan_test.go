package relay

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"sluice/dataplane/sse"
	"sluice/dataplane/transcript"
)

// nativeEvents is a stream of SGLang 0.5.23 with one id an event, cumulative or not.
func nativeEvents(n int, cumulative bool) (events [][]byte) {
	var text strings.Builder
	var ids []string
	for i := range n {
		if !cumulative {
			text.Reset()
			ids = ids[:0]
		}
		fmt.Fprintf(&text, " w%d", i)
		ids = append(ids, fmt.Sprint(900+i))
		events = append(events, fmt.Appendf(nil, "data: {\"text\":%q,\"output_ids\":[%s],\"meta_info\":{\"id\":\"r\",\"finish_reason\":null,\"prompt_tokens\":4,\"completion_tokens\":%d,\"cached_tokens\":2,\"dp_rank\":null}}\n\n",
			text.String(), strings.Join(ids, ","), i+1))
	}
	return events
}

// scanNative scans what a Transcript makes of a stream's events, and describes the scanner's state
// after each event. walked: the scanner knows no shape, so that it walks each event. The engine is
// replaced before event number leave.
func scanNative(events [][]byte, deltas *bool, leave int, walked bool) string {
	t := &transcript.Transcript{Format: transcript.NativeFormat, ShowIDs: true, Deltas: deltas, Prompt: transcript.PackIDs([]uint32{7, 8})}
	t.HoldFailure()
	scan := &streamScanner{usage: noUsage}
	var out []byte
	for i, e := range events {
		if i == leave {
			t.SwitchEngine()
		}
		if walked {
			scan.native = nativeScan{}
		}
		scan.feed(t.Event(nil, slices.Clone(e)))
		out = fmt.Appendf(out, "%v %v %q %v\n", scan.token, scan.usage, scan.finish, scan.failed)
	}
	return string(out)
}

// In every mode, and over a change of the engine, a scanner reads events that have the shape of the
// one before as it reads events that it walks.
func TestNativeScanByShape(t *testing.T) {
	yes, no := true, false
	for _, first := range []bool{false, true} {
		for _, second := range []bool{false, true} {
			for _, deltas := range []*bool{nil, &yes, &no} {
				events := append(nativeEvents(6, first), nativeEvents(6, second)...)
				got := scanNative(events, deltas, 6, false)
				if want := scanNative(events, deltas, 6, true); got != want {
					t.Errorf("cumulative %v, then %v: got\n%swalked\n%s", first, second, got, want)
				}
			}
		}
	}
	scan := &streamScanner{usage: noUsage}
	for i, e := range nativeEvents(4, true) {
		if i > 0 && !scan.native.counts(sse.EventData(e), &scan.usage) {
			t.Errorf("event %d does not have the shape", i)
		}
		scan.feed(e)
	}
	if scan.usage != (Usage{Prompt: 4, Completion: 4, Cached: 2}) {
		t.Errorf("usage %v", scan.usage)
	}
}

// FuzzNativeScan is the first half of TestNativeScanByShape for arbitrary events.
func FuzzNativeScan(f *testing.F) {
	lines := func(events [][]byte) (all []byte) {
		for _, e := range events {
			all = append(append(all, sse.EventData(e)...), '\n')
		}
		return all
	}
	f.Add(lines(nativeEvents(4, true)), uint8(0))
	f.Add(lines(append(nativeEvents(3, false), nativeEvents(3, true)...)), uint8(3<<2))
	f.Add([]byte(`{"output_ids":[1],"meta_info":{"completion_tokens":1}}
{"output_ids":[1,2],"meta_info":{"completion_tokens":2}}
{"text":"a","output_ids":[3],"index":1,"meta_info":{"completion_tokens":2}}
{"text":"\ufffd","output_ids":[3],"meta_info":{"completion_tokens":3.5}}
{"text":"b","output_ids":[4],"meta_info":{"completion_tokens":3.5}}
{"error":{"code":503}}`), uint8(1))
	f.Add([]byte(`{"request_id":"g","choices":[{"index":0,"token_ids":[1],"logprobs":null,"finish_reason":null}]}
{"request_id":"g","choices":[{"index":0,"token_ids":[2,3],"logprobs":null,"finish_reason":null}]}
{"request_id":"g","choices":[{"index":1,"token_ids":[4],"logprobs":null,"finish_reason":null}]}
{"request_id":"g","choices":[{"index":0,"token_ids":[5],"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}
{"request_id":"g","choices":[{"index":0,"text":"","token_ids":[5],"finish_reason":null}],"usage":null}
{"request_id":"g","choices":[{"index":0,"text":"a","token_ids":[5],"finish_reason":null}],"usage":null}`), uint8(0))
	f.Fuzz(func(t *testing.T, all []byte, mode uint8) {
		var events [][]byte
		for line := range bytes.Lines(all) {
			events = append(events, fmt.Appendf(nil, "data: %s\n\n", bytes.TrimRight(line, "\n")))
		}
		yes, no := true, false
		deltas := [...]*bool{nil, &yes, &no, nil}[mode&3]
		got := scanNative(events, deltas, int(mode>>2), false)
		if want := scanNative(events, deltas, int(mode>>2), true); got != want {
			t.Errorf("got\n%swalked\n%s", got, want)
		}
	})
}
