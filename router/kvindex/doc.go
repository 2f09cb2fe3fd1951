// Package kvindex answers which (worker, rank) has how much of a prompt in its KV cache: an index
// over sequence hashes (blockhash.Seq) that the engines' KV events feed.
//
// Index is the interface that the scheduler reads and kvevents writes. The engines' own block
// hashes are opaque keys of a table per rank, so engines may differ in hash algorithm and seed. New
// returns the index, a radix tree of block extents that is read without a lock: radix.go describes
// the layout, node.go the memory order and find.go the guarantees for readers. Approx predicts the
// content in text mode and for engines without events. Naive is the reference model that tests
// compare with. The package knows nothing of tokens, sockets or the state of workers.
package kvindex
