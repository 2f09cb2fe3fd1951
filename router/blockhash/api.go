package blockhash

// Local identifies the tokens of one block, whatever came before it.
type Local uint64

// Seq identifies a block and all that came before it. It is the index key.
type Seq uint64

// Salt separates prompts that share tokens but not KV: see NewSalt.
type Salt uint64

// NewSalt makes the salt of a model, a LoRA adapter name and a cache salt; the
// empty string means none. Different triples give different salts.
func NewSalt(model, lora, cacheSalt string) Salt { panic("contract") }

// Locals appends the local hash of every full block of tokens to dst.
// blockSize is in tokens and positive.
func Locals(dst []Local, tokens []uint32, blockSize int) []Local { panic("contract") }

// Next is the sequence hash of a block after parent; First that of the first
// block of a prompt.
func Next(parent Seq, l Local) Seq { panic("contract") }

// First is the sequence hash of a prompt's first block.
func First(salt Salt, l Local) Seq { panic("contract") }

// Seqs appends the sequence hash of every full block of tokens to dst, in one
// pass: what Locals, First and Next give together.
func Seqs(dst []Seq, salt Salt, tokens []uint32, blockSize int) []Seq { panic("contract") }

// TextSeqs is Seqs over raw bytes for text mode: blocks of blockBytes bytes.
func TextSeqs(dst []Seq, salt Salt, text []byte, blockBytes int) []Seq { panic("contract") }
