// Package sim is a simulated inference engine: real sockets, real HTTP and SSE
// bytes, real ZMQ KV events, a real paged KV cache, and no model.
//
// Its main type is Engine, made by Start. `sluice sim` and `sluice demo` run it,
// tests use it in process, and the benchmarks load the router with it.
//
// What is true to vLLM 0.32 (formats checked against captures of it): response,
// error and SSE shapes, one event per HTTP chunk; ids from X-Request-Id; DP ranks
// by header or by port; prefix caching by chained block hash (the sha256_cbor
// recipe, or SGLang's), one null block, reference counts, tail-first LRU
// eviction, preemption by recompute, chunked prefill; KV events in every encoding
// engines have used, replay, sequence numbers per life; the NixlConnector pull
// protocol over HTTP: handle, lease, heartbeats, release, expiry, and what 0.32
// does with a handle that is expired or incomplete.
//
// What is written from the protocol, without a capture to hold it against but for
// SGLang's chat stream and /generate: engine "sglang" (0.5.23): native and OpenAI
// endpoints and errors, bootstrap server, hand-over by room, its discovery, load
// and abort calls; vLLM's MooncakeConnector and NixlPushConnector (Options.PD);
// engine "trtllm" (two endpoints, no tokenizer, its hand-over in every choice);
// LMCache over NIXL with notifications over real ZMQ, production-stack's
// orchestrated mode, a shared KV store with llm-d's cache_hit_threshold. A
// family is a face (face.go) and a pdLeg; sglang.go and room.go show one whole.
//
// What is simulated: time (a linear cost model, see Cost), the KV transfer (a
// private HTTP exchange instead of NIXL, paid by bytes over bandwidth), tokens (a
// byte-level vocabulary made of fixed word pieces, see tokenizer.go) and the text,
// which is a pure function of model, seed, choice index and the token ids so far:
// the same on every instance, and a continuation of prompt plus output equals the
// undisturbed output.
//
// What is not there: sampling parameters other than seed have no effect; no
// log-probabilities but on vLLM's chat completions, completions and token
// generation (logprobs.go) and SGLang's /generate (sglang_logprobs.go), no
// reasoning, no guided decoding but a choice among texts (choice.go), no images
// beyond an affinity hash of their URL, no LoRA, no speculative decoding, no TLS. A batch
// stays on one rank, where SGLang spreads it over the ranks of its rooms; a leg
// whose prompt differs from the other's fails, where a real engine reads garbage.
// It never imports the router.
package sim
