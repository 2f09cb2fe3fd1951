// Package kvindex answers which (worker, rank) holds how much of a prompt: an
// index over sequence hashes (blockhash.Seq) fed by the engines' KV events.
//
// Index is the interface the scheduler's side reads and kvevents writes; the
// engines' own block hashes are opaque keys of a per-rank side table, so that
// engines may differ in algorithm and seed. New makes the index, a radix of runs of
// blocks that is read without a lock: radix.go says how it is laid out, fragment.go
// how its memory is ordered, find.go what readers are promised. Approx is the one of
// text mode and of engines without events, and Naive is the plain model that tests
// compare with. Nothing here knows tokens, sockets or workers' state.
package kvindex
