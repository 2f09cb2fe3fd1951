// Package kvcache is the paged KV cache of one simulated rank: block hashes and a pool
// of blocks.
//
// A Hasher computes chained block hashes by the recipe of vLLM (sha256_cbor) or SGLang.
// A Pool allocates, shares, caches and evicts blocks as vLLM's block manager does, with
// one null block, reference counts and tail-first LRU eviction. Its caller is package
// sim; a Pool belongs to the goroutine of its rank. It holds no KV data.
package kvcache
