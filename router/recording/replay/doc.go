// Package whatif asks of a recording (package record) what other weights or
// policies would have done: the real index and the real scheduler choose again, in
// simulated time, over simulated caches.
//
// Load reads files into a Trace, Trace.Run plays it under a Variant and gives a
// Result; cmd's sluice replay prints them. Recorded events are the consequences of
// the recorded choices, so a variant cannot use them: every rank of the model has
// a cache of its own (blocks as announced, the least recently used go first) that
// begins with what the rank held when it was recorded and that only the variant's
// own choices fill from there on. A rank computes one prompt after another,
// uncached tokens at one rate, which Calibrate sets such that the recorded choices
// give the recorded median time to first token; how far the model can be trusted
// is what Result.Fidelity says of it under the recorded choices.
//
// Left out of the model: batching of prefills, decode that slows prefill, blocks
// held by requests under way, failures and retries, workers that come and go.
package replay
