package kvevents

import (
	"sluice/router/blockhash"
	"sluice/router/kvindex"
)

// Event is one decoded KV event, whatever the encoding it came in. Slices are
// borrowed until the decoder's next call; strings may be kept.
type Event struct {
	Kind      EventKind
	Hashes    []kvindex.EngineHash
	HasParent bool
	Parent    kvindex.EngineHash
	Tokens    []uint32 // empty for offload-tier stores; pairs lie flat, two a position
	Pairs     bool     // every position is a pair of tokens (SGLang with EAGLE)
	BlockSize int
	Medium    string // as sent; "" when nil
	LoRA      string // the adapter's name, "lora_id:N" where only a number was sent
	CacheSalt string
	Group     int    // KV cache group
	CacheKind string // what the group's layers are, "full_attention" and others; "" before vLLM 0.22
	Locality  Locality
	Extra     bool // blocks carry extra keys beyond LoRA and salt (multimodal)
	// Locals has one hash per block when the event can be placed block by
	// block, else it is empty: no tokens, skipped blocks, or tokens that are
	// not block size times blocks.
	Locals []blockhash.Local
}

// EventKind tells the KV events apart.
type EventKind uint8

// The kinds.
const (
	BlockStored EventKind = iota
	BlockRemoved
	AllBlocksCleared
	Unknown // a kind that engines do not send yet; nothing but Kind is set
)

var kindNames = [...]string{"BlockStored", "BlockRemoved", "AllBlocksCleared", "unknown"}

// String gives the kind's name on the wire.
func (k EventKind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

// TierOf maps an event's medium to a tier: vLLM's GPU, CPU, FS, OBJ and STORAGE,
// SGLang's GPU, CPU_PINNED, DISK and EXTERNAL. Releases before the field mean the
// GPU. It is false for a medium nobody has sent yet.
func TierOf(medium string) (kvindex.Tier, bool) {
	switch medium {
	case "", "GPU":
		return kvindex.Device, true
	case "CPU", "CPU_PINNED":
		return kvindex.Host, true
	case "DISK", "FS", "OBJ", "STORAGE", "EXTERNAL":
		return kvindex.Disk, true
	}
	return kvindex.Disk, false
}
