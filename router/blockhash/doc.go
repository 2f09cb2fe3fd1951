// Package blockhash turns a prompt's token ids into the keys of the KV index:
// the tokens are cut into blocks of a worker's block size, each block has a
// local hash (its own tokens), and the chain of local hashes from the prompt's
// start gives each block a sequence hash, salted by model, LoRA adapter and
// cache salt so that equal tokens under different ones never meet.
//
// A last block that is not full is not hashed and never indexed. Engines' own
// hashes are opaque elsewhere (kvindex's side table); these are ours alone. The
// hashes are the same on every machine and never change silently: two routers,
// or a router and a recording, may compare them. They are not cryptographic: a
// crafted collision sends a request to a worker without its prefix, no more.
package blockhash
