package relay

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/sse"
	"sluice/dataplane/transcript"
	"sluice/dataplane/upstream"
)

// BenchmarkMigratable is what a stream that may move costs for each event of one token, from
// the engine's chunk to what its client is given: events, or records for a client of this
// program.
func BenchmarkMigratable(b *testing.B) {
	yes := true
	for _, form := range []struct {
		name  string
		t     func() *transcript.Transcript
		event string
	}{
		{"completions", func() *transcript.Transcript {
			return &transcript.Transcript{ShowIDs: true, Prompt: transcript.PackIDs([]uint32{1})}
		}, `{"id":"cmpl-r1","object":"text_completion","created":1763690000,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[1234]}]}`},
		{"generate", func() *transcript.Transcript {
			return &transcript.Transcript{ShowIDs: true, Prompt: transcript.PackIDs([]uint32{1}), Format: transcript.GenerateFormat, NoText: true}
		}, `{"request_id":"r1","choices":[{"index":0,"token_ids":[1234],"logprobs":null,"finish_reason":null}]}`},
		{"native", func() *transcript.Transcript {
			return &transcript.Transcript{ShowIDs: true, Prompt: transcript.PackIDs([]uint32{1}), Format: transcript.NativeFormat, Deltas: &yes}
		}, `{"text":" word","output_ids":[1234],"meta_info":{"id":"r-1","finish_reason":null,"prompt_tokens":400,"weight_version":"default","num_retractions":0,"completion_tokens":%d,"cached_tokens":384,"cached_tokens_details":null,"dp_rank":null}}`},
	} {
		for _, records := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/records=%v", form.name, records), func(b *testing.B) {
				t := form.t()
				t.Records = records
				s := &stream{resp: new(upstream.Response), chunked: true, scanning: true, extras: &streamExtras{migration: Migration{Transcript: t}}}
				s.scan.usage, s.scan.mayHaveRecords = noUsage, records
				s.editor = &editor{rewriter: t}
				var chunks [1000][]byte
				for i := range chunks {
					event := form.event
					if strings.Contains(event, "%d") {
						event = fmt.Sprintf(event, i+1)
					}
					chunks[i] = sse.AppendChunk(nil, []byte("data: "+event+"\n\n"))
				}
				now, n := time.Now(), 0
				b.ReportAllocs()
				for b.Loop() {
					if n == len(chunks) {
						t.Out, n = t.Out[:0], 0
					}
					_ = s.process(chunks[n], now)
					n++
				}
				if t.Blocked() != "" {
					b.Fatal(t.Blocked())
				}
			})
		}
	}
}
