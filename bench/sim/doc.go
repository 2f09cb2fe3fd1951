// Package sim is a simulated inference engine: real sockets, HTTP and SSE bytes, ZMQ
// KV events and a paged KV cache, but no model.
//
// Its main type is Engine; Start makes one. `sluice sim` and `sluice demo` run it, tests
// use it in process, and the benchmarks load the router with it. It never imports the
// router.
//
// The process is here: an incarnation is one life of it, with its sockets, endpoints and
// statistics. Package core has the ranks with their scheduler, leases and jobs. Each P/D family
// is a package that sees only core: nixl (pull and push), mooncake, sglang, trtllm, lmcache,
// orchestrated, storage; offer has what two of them share. What needs no engine is in
// packages of its own: options, httpconn (connections), api (requests, responses and errors of the
// HTTP APIs), bootstrap, eventpub, textgen, kvcache, eventcodec, vllm, faults, cost,
// portreserve.
//
// Verified against captures of vLLM 0.32: response, error and SSE formats, one event for
// each HTTP chunk; ids from X-Request-Id; data-parallel ranks by header or port; prefix
// caching by chained block hash (sha256_cbor, or SGLang's), one null block, reference
// counts, tail-first LRU eviction, preemption by recompute, chunked prefill; KV events in
// every encoding that engines have used, with replay and a sequence that restarts with
// the engine; the NixlConnector pull protocol over HTTP: handle, lease, heartbeats,
// release, expiry, and the behaviour of 0.32 for an expired or incomplete handle.
//
// Written from the protocol, without captures except for SGLang's chat stream and
// /generate: engine "sglang" (0.5.23) with native and OpenAI endpoints and errors,
// bootstrap server, hand-over by room, discovery, load and abort calls; vLLM's
// MooncakeConnector and NixlPushConnector (Options.PD); engine "trtllm" (two endpoints, no
// tokenizer, its hand-over in every choice); LMCache over NIXL with notifications over
// ZMQ; the orchestrated mode of production-stack; a shared KV store with llm-d's
// cache_hit_threshold. A P/D family is a core.Family and an entry of the table in surface.go;
// package orchestrated is the shortest, package sglang shows one in full.
//
// Simulated: time (package cost); the KV transfer (a private HTTP exchange instead of
// NIXL, whose time is bytes over bandwidth); tokens and text (package textgen). The text
// is a pure function of model, seed, choice index and the token ids so far. It is the same
// on every instance, and a continuation of prompt plus output equals the undisturbed output.
//
// Not simulated: sampling parameters other than seed have no effect; log probabilities
// exist only on vLLM's chat completions, completions and token generation (api/logprobs.go) and
// on SGLang's /generate (api/sglang_logprobs.go); no reasoning, no guided decoding except a
// choice among texts (api/constrained.go), no images beyond an affinity hash of their URL, no LoRA,
// no speculative decoding, no TLS. A batch stays on one rank, whereas SGLang spreads it over
// the ranks of its rooms. A leg whose prompt differs from the other leg's fails, whereas a
// real engine reads wrong KV.
package sim
