package family

import (
	"slices"
	"strings"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// BenchmarkFamilyLegs measures the cost of a family for one request with a prompt of 4,096 tokens:
// writing both legs and finding the handle.
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
	// the handle of vLLM 0.32 for a chat of 65,536 tokens
	blocks, long := make([]uint32, 4096), string(jsonscan.AppendTokenIDs(nil, slices.Repeat(ids, 16)))
	for i := range blocks {
		blocks[i] = uint32(10_000 + i)
	}
	answers["nixl, 64k tokens"] = `{"id":"x","choices":[{"text":"a"}],"usage":{"prompt_tokens":65536},"prompt_token_ids":` + long +
		`,"kv_transfer_params":` + strings.Replace(handles[2].member, "[[7,8,9,10,11,12,13]]", "["+string(jsonscan.AppendTokenIDs(nil, blocks))+"]", 1) + `}`
	var doc jsonscan.Doc
	if err := doc.Scan(client, jsonscan.Limits{}); err != nil {
		b.Fatal(err)
	}
	decode := lmcacheDecode(worker.Spec{})
	newest := worker.New(worker.Spec{ID: "new", URL: "http://10.0.0.3:8200"})
	newest.SetInfo(&worker.Info{Version: "0.32.0"})
	for _, name := range []string{"nixl", "nixl, 64k tokens", "orchestrated", "storage", "trtllm", "lmcache"} {
		family, _, long := strings.Cut(name, ",")
		f, err := ByName(family)
		if err != nil {
			b.Fatal(err)
		}
		answer := []byte(answers[name])
		b.Run(name, func(b *testing.B) {
			var leg LegRequest
			var segments [][]byte
			var fact []byte
			b.ReportAllocs()
			for b.Loop() {
				p := Handover{Kind: front.Chat, Doc: &doc, Stream: true, Tokens: ids, Decode: decode, Token: 1, PrefillCached: -1}
				if long {
					p.Prefill, p.Decode, p.PrefillCached = newest.Ranks[0], newest.Ranks[0], 16
				}
				for _, write := range []func(*LegRequest, *Handover){f.Prefill, f.Decode} {
					leg.Reset()
					write(&leg, &p)
					if leg.Body == nil {
						segments = doc.Segments(segments[:0], leg.Edits...)
					}
					if p.Answer == nil {
						p.Answer = answer
						if p.Handle, err = f.Handle(&p, answer); err != nil {
							b.Fatal(err)
						}
						if learner, ok := f.(PeerInfoLearner); ok {
							fact = learner.LearnPeerInfo(fact[:0], &p)
						}
					}
				}
			}
		})
	}
}
