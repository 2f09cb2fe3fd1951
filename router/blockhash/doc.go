// Package blockhash turns a prompt's token ids into the keys of the KV index. The tokens are
// divided into blocks of a worker's block size. Each block has a local hash of its own tokens, and
// the chain of local hashes from the prompt's start gives it a sequence hash, salted by model, LoRA
// adapter and cache salt so that equal tokens under different salts have different hashes.
//
// An incomplete last block is not hashed and never indexed. Engines' own hashes are opaque keys of
// kvindex. The hashes of this package are the same on every machine and never change silently: two
// routers, or a router and a recording, may compare them. They are not cryptographic: a crafted
// collision only sends a request to a worker without its prefix.
package blockhash
