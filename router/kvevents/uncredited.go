package kvevents

import (
	"slices"
	"sync/atomic"
)

// Locality says where blocks lie that an engine has told of, seen from that engine: the
// tier of an event has a medium, and may have a locality (vLLM since 0.26).
type Locality uint8

// The localities.
const (
	Unspecified Locality = iota
	Local                // at the publisher
	Remote               // not at the publisher; what is not known counts as this
)

// Names of the two localities by which blocks are not credited, as metrics have them.
const (
	LocalityRemote      = "remote"
	LocalityUnspecified = "unspecified"
)

// Media are those whose blocks may lie elsewhere, as metrics name them; the last is any other.
var Media = []string{"FS", "OBJ", "STORAGE", "EXTERNAL", "other"}

// isSharedMedium says whether a medium may be shared by many engines: file systems and object
// stores behind vLLM's offloading, and SGLang's storage back ends. What lies there is
// credited to a worker only when the engine says that it is its own: every release of vLLM that
// sends these media can say so (locality: LOCAL in the tier's configuration). A GPU, the host's
// memory and SGLang's DISK are the publisher's.
func isSharedMedium(medium string) bool {
	switch medium {
	case "FS", "OBJ", "STORAGE", "EXTERNAL":
		return true
	}
	return false
}

// UncreditedBlocks counts blocks that engines said were stored and that are credited to no worker,
// because they lie, or may lie, at another machine. Its methods may be called from any
// goroutine.
type UncreditedBlocks struct {
	remote, unspecified [5]atomic.Uint64 // by place in Media
}

func (e *UncreditedBlocks) add(ev *Event) {
	if e == nil || ev.Kind != BlockStored {
		return
	}
	at := slices.Index(Media, ev.Medium)
	if at < 0 {
		at = len(Media) - 1
	}
	if ev.Locality == Remote {
		e.remote[at].Add(uint64(len(ev.Hashes)))
	} else {
		e.unspecified[at].Add(uint64(len(ev.Hashes)))
	}
}

// Blocks is how many there were of a medium, one of Media, by locality.
func (e *UncreditedBlocks) Blocks(medium, locality string) uint64 {
	at := slices.Index(Media, medium)
	if at < 0 {
		return 0
	}
	if locality == LocalityRemote {
		return e.remote[at].Load()
	}
	return e.unspecified[at].Load()
}
