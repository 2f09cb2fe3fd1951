package family

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/config"
	"sluice/router/worker"
)

// handoverCase is one hand-over of one engine release: the workers, the client's request, and
// prefill's response.
type handoverCase struct {
	name     string
	family   Family
	version  string
	kind     front.Kind
	body     string
	answer   string // prefill's response, if decode follows it
	peerInfo string // response to the query of a PeerInfoFetcher
	learned  string // an earlier handle, for a PeerInfoLearner
	prefill  func(*worker.Spec, *worker.Info)
	ranks    int      // number of data-parallel ranks of both workers; the test uses the last one
	token    uint64   // Handover.Token
	ids      []uint32 // Handover.Tokens, if the legs carry them
}

const (
	chatBody   = `{"model":"m","messages":[{"role":"user","content":"hi \u00e9"}],"max_tokens":200,"stream":true,"stream_options":{"include_usage":true},"seed":9007199254740993}`
	promptBody = `{"model":"m","prompt":"hi","max_tokens":16,"stop":["x"],"x_unknown":{"b":1,"a":2}}`
	batchBody  = `{"model":"m","prompt":["a","b","c"],"max_tokens":16}`
)

var promptIDs = []uint32{151644, 872, 198}

func bootstrap(spec *worker.Spec, _ *worker.Info) {
	spec.Options = map[string][]string{"bootstrap_port": {"8998"}}
}

var handoverCases = []handoverCase{
	{name: "nixl, vLLM 0.9: a flat list of blocks", family: nixlPull{}, version: "0.9.0", kind: front.Chat, body: chatBody, answer: nixlAnswer(handles[0].member)},
	{name: "nixl, vLLM 0.18: a list per KV group", family: nixlPull{}, version: "0.18.0", kind: front.Completions, body: promptBody, answer: nixlAnswer(handles[1].member)},
	{name: "nixl, vLLM 0.31: what prefill found cached", family: nixlPull{}, version: "0.31.0", kind: front.Chat, body: chatBody, answer: nixlAnswer(handles[1].member)},
	{name: "nixl, vLLM 0.32: the prompt's ids go on", family: nixlPull{}, version: "0.32.0+cpu", kind: front.Chat, body: chatBody, answer: nixlAnswer(handles[2].member)},
	{name: "nixl, vLLM 0.32: no ids with an image", family: nixlPull{}, version: "0.32.0", kind: front.Chat, body: `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}}]}]}`, answer: nixlAnswer(handles[2].member)},
	{name: "nixl, vLLM 0.32: no ids for a completion", family: nixlPull{}, version: "0.32.0", kind: front.Completions, body: promptBody, answer: nixlAnswer(handles[2].member)},
	{name: "nixl-push, the first request of an engine", family: nixlPush{}, version: "0.32.0", kind: front.Completions, body: promptBody, answer: nixlAnswer(handles[1].member)},
	{name: "nixl-push, both at once", family: nixlPush{}, version: "0.32.0", kind: front.Completions, body: promptBody, learned: handles[2].member},
	{name: "nixl-push, both at once, chat", family: nixlPush{}, version: "0.32.0", kind: front.Chat, body: chatBody, learned: handles[1].member},
	{name: "nixl-push, ids not known beforehand", family: nixlPush{}, version: "0.32.0", kind: front.ResponsesAPI, body: `{"model":"m","input":"hi"}`, learned: handles[2].member, answer: nixlAnswer(handles[2].member)},
	{name: "nixl, by ids", family: nixlPull{}, version: "0.32.0", kind: front.Chat, body: chatBody, answer: nixlAnswer(handles[2].member), ids: promptIDs},
	{name: "nixl, by ids, a completion", family: nixlPull{}, version: "0.32.0", kind: front.Completions, body: promptBody, answer: nixlAnswer(handles[2].member), ids: promptIDs},
	{name: "nixl, by ids, Messages", family: nixlPull{}, version: "0.32.0", kind: front.Messages, body: `{"model":"m","max_tokens":9,"system":"s","messages":[{"role":"user","content":"hi"}]}`, answer: nixlAnswer(handles[2].member), ids: promptIDs},
	{name: "nixl, by ids, Responses", family: nixlPull{}, version: "0.32.0", kind: front.ResponsesAPI, body: `{"model":"m","input":"hi","cache_salt":"s"}`, answer: nixlAnswer(handles[2].member), ids: promptIDs},
	{name: "nixl, vLLM 0.31 renders the text", family: nixlPull{}, version: "0.31.0", kind: front.Chat, body: chatBody, answer: nixlAnswer(handles[1].member), ids: promptIDs},
	{name: "nixl, an echo needs the text", family: nixlPull{}, version: "0.32.0", kind: front.Completions, body: `{"model":"m","prompt":"hi","echo":true}`, answer: nixlAnswer(handles[2].member), ids: promptIDs},
	{name: "nixl, the answer needs the text", family: nixlPull{}, version: "0.32.0", kind: front.Chat, body: `{"model":"m","messages":[{"role":"user","content":"hi"}],"return_prompt_text":true}`, answer: nixlAnswer(handles[2].member), ids: promptIDs},
	{name: "nixl-push, by ids, both at once", family: nixlPush{}, version: "0.32.0", kind: front.Chat, body: chatBody, learned: handles[2].member, ids: promptIDs},
	{name: "mooncake, by ids", family: mooncake{}, version: "0.33.0", kind: front.Chat, body: chatBody, peerInfo: `{"0":{"engine_id":"e-0","worker_addr":{"0":{"0":"10.0.0.1:5000"}}}}`, ids: promptIDs},
	{name: "storage, by ids", family: storage{}, version: "0.32.0", kind: front.Chat, body: chatBody, answer: `{"id":"x","choices":[]}`, ids: promptIDs},
	{name: "orchestrated, by ids", family: orchestrated{}, version: "0.32.0", kind: front.Chat, body: chatBody, answer: `{"id":"x","choices":[]}`, ids: promptIDs},
	{name: "sglang 0.5.23", family: sglang{}, version: "0.5.23", kind: front.Chat, body: chatBody, prefill: bootstrap},
	{name: "sglang 0.5.23, rank 3 of 4", family: sglang{}, version: "0.5.23", kind: front.Chat, body: chatBody, prefill: bootstrap, ranks: 4},
	{name: "sglang 0.5.8, rank 3 of 4", family: sglang{}, version: "0.5.8", kind: front.Completions, body: promptBody, prefill: bootstrap, ranks: 4},
	{name: "sglang 0.5.8, rank 3 of 4, n", family: sglang{}, version: "0.5.8", kind: front.Chat, body: `{"model":"m","messages":[],"n":2,"data_parallel_rank":0}`, prefill: bootstrap, ranks: 4},
	{name: "sglang, n", family: sglang{}, version: "0.5.23", kind: front.Chat, body: `{"model":"m","messages":[],"n":2,"routed_dp_rank":1,"disagg_prefill_dp_rank":0}`, prefill: bootstrap},
	{name: "sglang, a batch, rank 3 of 4", family: sglang{}, version: "0.5.23", kind: front.Completions, body: batchBody, prefill: bootstrap, ranks: 4},
	{name: "sglang /generate, text", family: sglang{}, version: "0.5.23", kind: front.NativeGenerate, body: `{"text":"hi","sampling_params":{"max_new_tokens":9,"n":1},"stream":true}`, prefill: bootstrap},
	{name: "sglang /generate, a batch of ids", family: sglang{}, version: "0.5.23", kind: front.NativeGenerate, body: `{"input_ids":[[1,2],[3]],"sampling_params":[{"max_new_tokens":9},{}]}`, prefill: bootstrap},
	{name: "sglang, port from the engine, host from the operator", family: sglang{}, version: "0.5.23", kind: front.Completions, body: promptBody, prefill: func(s *worker.Spec, i *worker.Info) {
		s.Options, i.BootstrapPort = map[string][]string{"bootstrap_host": {"10.0.0.7"}}, 8999
	}},
	{name: "sglang, the greatest room", family: sglang{}, version: "0.5.23", kind: front.Completions, body: promptBody, prefill: bootstrap, token: 1<<63 - 1},
	{name: "sglang, endpoint not known: prefill first", family: sglang{}, version: "0.5.23", kind: front.Completions, body: promptBody, answer: `{"id":"x","disaggregated_params":{"bootstrap_host":"10.0.0.9","bootstrap_port":8998,"bootstrap_room":9223372036854775807},"choices":[]}`},
	{name: "mooncake, vLLM 0.33", family: mooncake{}, version: "0.33.0", kind: front.Completions, body: promptBody, peerInfo: `{"0":{"engine_id":"e-0","worker_addr":{"0":{"0":"10.0.0.1:5000"}}}}`},
	{name: "mooncake, vLLM 0.16, rank 1 of 2", family: mooncake{}, version: "0.16.0", kind: front.Chat, body: chatBody, ranks: 2, prefill: bootstrap, peerInfo: `{"0":{"engine_id":"e-0"},"1":{"engine_id":"e-1"}}`},
	{name: "mooncake, vLLM 0.15: one after the other", family: mooncake{}, version: "0.15.1", kind: front.Completions, body: promptBody, answer: `{"id":"x","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.1","remote_port":6000}}`},
}

func nixlAnswer(handle string) string {
	return `{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"length"}],"prompt_token_ids":[9, 10,11],"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}},"kv_transfer_params":` + handle + `}`
}

// handover does what the runner does before decode. It fails the test if the runner would stop
// there.
func (s *handoverCase) handover(t testing.TB, doc *jsonscan.Doc) *Handover {
	t.Helper()
	if err := doc.Scan([]byte(s.body), jsonscan.Limits{}); err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	p := &Handover{Kind: s.kind, Doc: doc, RequestID: "r-1", Token: s.token, Tokens: s.ids, ByIDs: s.ids != nil, PrefillCached: -1, Prefill: s.rank("10.0.0.1", s.prefill), Decode: s.rank("10.0.0.2", nil)}
	if p.Token == 0 {
		p.Token = 0x0123456789abcdef
	}
	if asker, ok := s.family.(PeerInfoFetcher); ok && s.peerInfo != "" {
		var err error
		if p.PeerInfo, err = asker.ParsePeerInfo(p, []byte(s.peerInfo)); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
	}
	if s.learned != "" {
		p.Handle = []byte(s.learned)
		p.PeerInfo = string(s.family.(PeerInfoLearner).LearnPeerInfo(nil, p))
		p.Handle = nil
	}
	return p
}

func (s *handoverCase) rank(host string, mod func(*worker.Spec, *worker.Info)) *worker.Rank {
	spec := worker.Spec{ID: host, URL: "http://" + host + ":8200"}
	info := &worker.Info{Version: s.version}
	for i := range s.ranks {
		spec.Ranks = append(spec.Ranks, uint16(i))
	}
	if mod != nil {
		mod(&spec, info)
	}
	w := worker.New(spec)
	w.SetInfo(info)
	return w.Ranks[len(w.Ranks)-1]
}

var orderNames = map[Order]string{PrefillFirst: "prefill first", Concurrent: "both at once", DecodeFirst: "decode first"}

// TestFamilies compares both legs of every family and release with golden text.
func TestFamilies(t *testing.T) {
	var out strings.Builder
	show := func(name string, leg *LegRequest, doc *jsonscan.Doc, r *worker.Rank) {
		fmt.Fprintf(&out, "%s %s%s", name, leg.Path, doc.Edited(nil, leg.Edits...))
		if r.SendRank && !leg.RankInBody {
			fmt.Fprintf(&out, "  [rank %d by header]", r.ID.Rank)
		}
		out.WriteByte('\n')
	}
	for i := range handoverCases {
		s := &handoverCases[i]
		var doc jsonscan.Doc
		p := s.handover(t, &doc)
		order := s.family.Order(p)
		fmt.Fprintf(&out, "# %s: %s\n", s.name, orderNames[order])
		if asker, ok := s.family.(PeerInfoFetcher); ok {
			if base, path := asker.PeerInfoURL(p); base != "" {
				fmt.Fprintf(&out, "ask     %s%s -> %s\n", base, path, s.peerInfo)
			}
		}
		fmt.Fprintf(&out, "client  %s\n", s.body)
		var prefill, decode LegRequest
		s.family.Prefill(&prefill, p)
		show("prefill", &prefill, &doc, p.Prefill)
		if order == PrefillFirst {
			fmt.Fprintf(&out, "answer  %s\n", s.answer)
			var err error
			p.Answer = []byte(s.answer)
			p.PrefillCached = 2
			if p.Handle, err = s.family.Handle(p, p.Answer); err != nil {
				t.Errorf("%s: %v", s.name, err)
				continue
			}
		}
		s.family.Decode(&decode, p)
		show("decode ", &decode, &doc, p.Decode)
		out.WriteByte('\n')
	}
	golden(t, "testdata/families.txt", out.String())
}

func TestIncompleteAnswers(t *testing.T) {
	for _, k := range []struct {
		family Family
		body   string
	}{
		{sglang{}, `{}`},
		{sglang{}, `{"disaggregated_params":null}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":"h","bootstrap_port":1}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":null}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_port":1,"bootstrap_room":5}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":"h","bootstrap_room":5}}`},
		{sglang{}, `<html>`},
		{mooncake{}, `{"kv_transfer_params":{"remote_host":"h"}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":7,"bootstrap_port":1,"bootstrap_room":5}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":"h","bootstrap_port":"1","bootstrap_room":5}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":"5"}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":["h",7],"bootstrap_port":[1,2],"bootstrap_room":[5,6]}}`},
		{sglang{}, `{"disaggregated_params":{"bootstrap_host":["h","h"],"bootstrap_port":[1,{}],"bootstrap_room":[5,6]}}`},
		{trtllm{}, `{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":{},"first_gen_tokens":[1]}}]}`},
		{trtllm{}, `{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":1.5,"first_gen_tokens":[1]}}]}`},
		{trtllm{}, `{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":7,"first_gen_tokens":["1"]}}]}`},
		{mooncake{}, `{"kv_transfer_params":{"remote_host":7,"remote_port":1}}`},
		{mooncake{}, `{"kv_transfer_params":{"remote_host":"h","remote_port":"1"}}`},
		{mooncake{}, `{"kv_transfer_params":null}`},
		{nixlPush{}, `{"kv_transfer_params":{"remote_engine_id":"e","remote_host":"h","remote_port":"1","tp_size":1}}`},
		{nixlPush{}, `{"kv_transfer_params":{"remote_engine_id":"e","remote_host":"h","remote_port":1,"tp_size":"1"}}`},
		{nixlPush{}, `{"kv_transfer_params":{"remote_engine_id":"e","remote_host":"h","remote_port":1}}`},
	} {
		if got, err := k.family.Handle(&Handover{}, []byte(k.body)); !errors.Is(err, ErrIncompleteHandle) {
			t.Errorf("%s: %s gives %q, %v; want ErrIncompleteHandle", k.family.Name(), k.body, got, err)
		}
	}
	for _, body := range []string{`{}`, `{"1":{"engine_id":"e"}}`, `{"0":{}}`, `{"0":{"engine_id":7}}`, `{"0":{"engine_id":""}}`, `{"0":{"engine_id":null}}`, `{"0":`, `[]`} {
		p := &Handover{Prefill: (&handoverCase{}).rank("h", nil)}
		if got, err := (mooncake{}).ParsePeerInfo(p, []byte(body)); err == nil {
			t.Errorf("mooncake: /query answer %s gives %q; want an error", body, got)
		}
	}
}

// TestBootstrapRooms checks that every room is in 0 … 2^63-1, is congruent to the prefill rank, and
// is used by one hand-over only.
func TestBootstrapRooms(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 8} {
		s := handoverCase{family: sglang{}, kind: front.Completions, body: batchBody, prefill: bootstrap, ranks: ranks, version: "0.5.23"}
		seen := map[uint64]bool{}
		for _, token := range []uint64{1, 1 << 40, 1<<63 - 1, 1<<63 - 1000, 0x5555555555555555, 4242} {
			s.token = token
			var doc jsonscan.Doc
			p := s.handover(t, &doc)
			n := 0
			for it := jsonscan.Walk(appendBootstrapRooms(nil, p)); it.Next(); n++ {
				var bootstrapRoom uint64
				if _, err := fmt.Sscan(string(it.Raw()), &bootstrapRoom); err != nil {
					t.Fatal(err)
				}
				if bootstrapRoom > 1<<63-1 || bootstrapRoom%uint64(ranks) != uint64(ranks-1) || seen[bootstrapRoom] {
					t.Errorf("token %d, %d ranks: room %d is out of range, not of rank %d, or not its own", token, ranks, bootstrapRoom, ranks-1)
				}
				seen[bootstrapRoom] = true
			}
			if n != 3 {
				t.Errorf("%d rooms for 3 prompts", n)
			}
		}
	}
}

// TestConfigFamilies checks that package config, which may not import this package, lists the same
// families.
func TestConfigFamilies(t *testing.T) {
	want := append(Names(), "off")
	got := config.Families()
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("config knows the families %v, this package has %v", got, want)
	}
}

// BenchmarkLegs measures the cost of writing both legs of a family. No family allocates.
func BenchmarkLegs(b *testing.B) {
	for _, name := range []string{"nixl, vLLM 0.18: a list per KV group", "nixl, vLLM 0.32: the prompt's ids go on", "nixl-push, both at once", "sglang 0.5.23", "sglang, a batch, rank 3 of 4", "mooncake, vLLM 0.33"} {
		s := &handoverCases[slices.IndexFunc(handoverCases, func(s handoverCase) bool { return s.name == name })]
		b.Run(strings.ReplaceAll(name, " ", "_"), func(b *testing.B) {
			var doc jsonscan.Doc
			p := s.handover(b, &doc)
			b.ReportAllocs()
			run := writeLegs(s, p)
			for b.Loop() {
				run()
			}
		})
	}
}

// writeLegs writes both legs as the runner does, into reused memory.
func writeLegs(s *handoverCase, p *Handover) func() {
	leg, answer := new(LegRequest), []byte(s.answer)
	var segments [][]byte
	return func() {
		p.Handle, p.Answer = nil, nil
		order := s.family.Order(p)
		leg.Reset()
		s.family.Prefill(leg, p)
		segments = p.Doc.Segments(segments[:0], leg.Edits...)
		if order == PrefillFirst {
			p.Answer = answer
			p.Handle, _ = s.family.Handle(p, answer)
		}
		leg.Reset()
		s.family.Decode(leg, p)
		segments = p.Doc.Segments(segments[:0], leg.Edits...)
	}
}

func TestLegsDoNotAllocate(t *testing.T) {
	for i := range handoverCases {
		s := &handoverCases[i]
		var doc jsonscan.Doc
		run := writeLegs(s, s.handover(t, &doc))
		run()
		if n := testing.AllocsPerRun(100, run); n != 0 {
			t.Errorf("%s: %v allocations a request, want none", s.name, n)
		}
	}
}
