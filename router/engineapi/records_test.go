package engineapi

import (
	"fmt"
	"strings"
	"testing"

	"sluice/dataplane/transcript"
)

// TestRecordsMatchFullParse: a stream whose events the relay has replaced by id records
// produces the same items as the events, whatever is between them.
func TestRecordsMatchFullParse(t *testing.T) {
	yes, no := true, false
	var plain, tokens, deltas, cumulative []string
	all, text := "", ""
	for i := range 40 {
		ids := fmt.Sprint(100*i + 7)
		if i%5 == 3 {
			ids += fmt.Sprint(",", 100*i+8)
		}
		if all += "," + ids; i == 0 {
			all = ids
		}
		text += "w"
		n := strings.Count(all, ",") + 1
		plain = append(plain, data(`{"id":"c","choices":[{"index":0,"text":"w","logprobs":null,"finish_reason":null,"token_ids":[`+ids+`]}]}`))
		tokens = append(tokens, data(`{"request_id":"g","choices":[{"index":0,"token_ids":[`+ids+`],"logprobs":null,"finish_reason":null}]}`))
		deltas = append(deltas, data(fmt.Sprintf(`{"text":"w","output_ids":[%s],"meta_info":{"id":"n","finish_reason":null,"prompt_tokens":3,"completion_tokens":%d,"cached_tokens":1}}`, ids, n)))
		cumulative = append(cumulative, data(fmt.Sprintf(`{"text":%q,"output_ids":[%s],"meta_info":{"id":"n","finish_reason":null,"prompt_tokens":3,"completion_tokens":%d,"cached_tokens":1}}`, text, all, n)))
		if i == 20 { // an event that is not replaced
			plain = append(plain, ": here\n\n", data(`{"id":"c","choices":[{"index":0,"text":"","finish_reason":null,"token_ids":[]}]}`))
			deltas = append(deltas, ": here\n\n")
		}
	}
	n := strings.Count(all, ",") + 2
	usage := fmt.Sprintf(`"usage":{"prompt_tokens":3,"completion_tokens":%d}`, n)
	plain = append(plain, data(`{"id":"c","choices":[{"index":0,"text":"z","finish_reason":"length","token_ids":[9]}]}`), data(`{"id":"c","choices":[],`+usage+`}`))
	tokens = append(tokens, data(`{"request_id":"g","choices":[{"index":0,"token_ids":[9],"finish_reason":"length"}]}`), data(`{"request_id":"g","choices":[],`+usage+`}`))
	end := `"meta_info":{"id":"n","finish_reason":{"type":"length"},"prompt_tokens":3,"completion_tokens":` + fmt.Sprint(n) + `,"cached_tokens":1}}`
	deltas = append(deltas, data(`{"text":"z","output_ids":[9],`+end))
	cumulative = append(cumulative, data(`{"text":"`+text+`z","output_ids":[`+all+`,9],`+end))
	for _, c := range []struct {
		name       string
		dialect    engineDialect
		transcript *transcript.Transcript
		events     []string
	}{
		{"completions", completions, &transcript.Transcript{}, plain},
		{"generate", generate, &transcript.Transcript{Format: transcript.GenerateFormat, NoText: true}, tokens},
		{"deltas", native, &transcript.Transcript{Format: transcript.NativeFormat, Deltas: &yes}, deltas},
		{"cumulative", native, &transcript.Transcript{Format: transcript.NativeFormat, Deltas: &no}, cumulative},
		{"deltas, not reported", native, &transcript.Transcript{Format: transcript.NativeFormat}, deltas},
		{"cumulative, not reported", native, &transcript.Transcript{Format: transcript.NativeFormat}, cumulative},
	} {
		c.events = append(c.events, "data: [DONE]\n\n")
		fresh := func() converter {
			return converter{dialect: c.dialect, usage: noUsage, firstComments: []string{"first"}}
		}
		want := convert(t, fresh(), c.events...)
		c.transcript.ShowIDs, c.transcript.Records, c.transcript.Prompt = true, true, transcript.PackIDs([]uint32{1, 2, 3})
		var got []string
		short := 0
		o := itemWriter{converter: fresh(), idRecords: true}
		o.send = func(it *item) error {
			got = append(got, strings.TrimSuffix(string(jsonItems{}.append(nil, it)), "\n\n"))
			return nil
		}
		o.sendIDs = func(ids []uint32) error {
			short++
			got = append(got, "data: "+jsonOf(t, msgpackItems{}.appendIDs(nil, ids)))
			return nil
		}
		records := 0
		for _, e := range c.events {
			p := c.transcript.Event(nil, []byte(e))
			if _, n := transcript.ParseIDRecord(p); n > 0 {
				records++
			}
			if _, err := o.Write(p); err != nil {
				t.Fatal(err)
			}
		}
		if joined := strings.Join(got, "\n"); joined != want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, joined, want)
		}
		if records < 36 || short < 36 {
			t.Errorf("%s: %d records, %d items by the short way, of 41 events", c.name, records, short)
		}
		if more := string(c.transcript.Event(nil, []byte("\x00\x01\x00\x00\x00abcd\n\n"))); more != "" {
			t.Errorf("%s: an engine's own record passes: %q", c.name, more)
		}
	}
}
