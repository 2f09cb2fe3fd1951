// Package replay computes from a recording (package recording) what other weights or policies
// would have done. The real scheduler and the real index choose again, in simulated time and
// over simulated caches.
//
// Load reads files into a Trace. Trace.Run plays the Trace with a Variant and returns a Result,
// which sluice replay prints. Recorded events are consequences of the recorded choices, so a
// variant cannot use them. Instead every rank of the model has its own LRU cache, of as many
// blocks as the rank announced. The cache begins with the blocks that the rank held when it was
// recorded; from then on only the variant's own choices fill it. A rank computes one prompt
// after another, and uncached tokens at one constant rate. Calibrate sets this rate such that
// the recorded choices yield the recorded median time to first token. Result.Fidelity shows how
// well the model reproduces the recorded choices.
//
// The model omits batching of prefills, decode work that slows down prefill, blocks in use by
// running requests, failures and retries, and workers that join or leave.
package replay
