package disagg

import (
	"strings"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// BenchmarkFamilyLegs is what a family itself costs for one request: both legs
// written, and the handle found, for a prompt of 4,096 tokens.
func BenchmarkFamilyLegs(b *testing.B) {
	ids := make([]uint32, 4096)
	for i := range ids {
		ids[i] = uint32(i * 31 % 150000)
	}
	client := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 4096) + `"}],"max_tokens":200,"temperature":0.7,"stream":true}`)
	prompt := string(jsonscan.AppendTokenIDs(nil, ids))
	answers := map[string]string{
		"nixl":         `{"id":"x","choices":[{"text":"a"}],"kv_transfer_params":` + handles[1].member + `}`,
		"orchestrated": `{"id":"x","choices":[{"text":"a","finish_reason":"length"}]}`,
		"storage":      `{"id":"x","choices":[{"text":"a","finish_reason":"length"}]}`,
		"trtllm":       `{"id":"x","choices":[{"text":"a","finish_reason":"length","disaggregated_params":{"request_type":"context_only","first_gen_tokens":[1],"ctx_request_id":2,"encoded_opaque_state":"` + strings.Repeat("A", 512) + `"}}],"prompt_token_ids":` + prompt + `}`,
		"lmcache":      `{"id":"x","choices":[{"text":"a","finish_reason":"length"}],"kv_transfer_params":{"first_tok":7}}`,
	}
	var doc jsonscan.Doc
	if err := doc.Scan(client, jsonscan.Limits{}); err != nil {
		b.Fatal(err)
	}
	decode := lmcacheDecode(worker.Spec{})
	for _, name := range []string{"nixl", "orchestrated", "storage", "trtllm", "lmcache"} {
		f, err := FamilyByName(name)
		if err != nil {
			b.Fatal(err)
		}
		answer := []byte(answers[name])
		b.Run(name, func(b *testing.B) {
			var leg Leg
			var segments [][]byte
			b.ReportAllocs()
			for b.Loop() {
				p := Pair{Kind: front.Chat, Doc: &doc, Stream: true, Tokens: ids, Decode: decode, Token: 1, PrefillCached: -1}
				for _, write := range []func(*Leg, *Pair){f.Prefill, f.Decode} {
					leg.reset()
					write(&leg, &p)
					if leg.Body == nil {
						segments = doc.Segments(segments[:0], leg.Edits...)
					}
					if p.Answer == nil {
						p.Answer = answer
						if p.Handle, err = f.Handle(&p, answer); err != nil {
							b.Fatal(err)
						}
					}
				}
			}
		})
	}
}
