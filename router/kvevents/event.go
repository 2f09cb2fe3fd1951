package kvevents

import (
	"sluice/router/blockhash"
	"sluice/router/kvindex"
)

// Event is one decoded KV event, independent of its encoding. Slices are borrowed until the
// decoder's next call; strings may be kept.
type Event struct {
	Kind      EventKind
	Hashes    []kvindex.EngineHash
	HasParent bool
	Parent    kvindex.EngineHash
	Tokens    []uint32 // empty for offload-tier stores; with Pairs, two per position
	Pairs     bool     // every position is a pair of tokens (SGLang with EAGLE)
	BlockSize int
	Medium    string // as sent; "" for nil
	LoRA      string // the adapter's name, or "lora_id:N" if only a number was sent
	CacheSalt string
	Group     int    // KV cache group
	CacheKind string // kind of the group's layers, such as "full_attention"; "" before vLLM 0.22
	Locality  Locality
	Extra     bool // blocks have extra keys beyond LoRA and salt (multimodal)
	// Locals has one hash per block if the event can be stored block by block. Otherwise it is
	// empty: the event has no tokens, skips blocks, or the number of tokens is not the block size
	// times the number of blocks.
	Locals []blockhash.Local
}

// EventKind is the kind of a KV event.
type EventKind uint8

// The kinds of events.
const (
	BlockStored EventKind = iota
	BlockRemoved
	AllBlocksCleared
	Unknown // a kind that this version does not know; only Kind is set
)

var kindNames = [...]string{"BlockStored", "BlockRemoved", "AllBlocksCleared", "unknown"}

// String returns the kind's name in the wire format.
func (k EventKind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

// TierOf returns the tier of an event's medium: vLLM's GPU, CPU, FS, OBJ and STORAGE, SGLang's GPU,
// CPU_PINNED, DISK and EXTERNAL. Releases before the field use the GPU. It returns false for an
// unknown medium.
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
