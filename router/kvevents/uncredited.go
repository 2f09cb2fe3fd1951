package kvevents

import (
	"slices"
	"sync/atomic"
)

// Locality is the location of an event's blocks relative to the publishing engine. An event has a
// medium and, since vLLM 0.26, may have a locality.
type Locality uint8

// The localities.
const (
	Unspecified Locality = iota
	Local                // at the publisher
	Remote               // not at the publisher; an unknown value counts as this
)

// The names, in metrics, of the two localities whose blocks are not credited.
const (
	LocalityRemote      = "remote"
	LocalityUnspecified = "unspecified"
)

// Media are the media whose blocks may be on another machine, by their names in metrics; the last
// stands for any other.
var Media = []string{"FS", "OBJ", "STORAGE", "EXTERNAL", "other"}

// isSharedMedium reports whether several engines may share a medium: file systems and object stores
// behind vLLM's offloading, and SGLang's storage back ends. Such blocks are credited to a worker
// only if the engine declares them its own; every vLLM release that sends these media can do so
// (locality: LOCAL in the tier's configuration). GPU, host memory and SGLang's DISK belong to the
// publisher.
func isSharedMedium(medium string) bool {
	switch medium {
	case "FS", "OBJ", "STORAGE", "EXTERNAL":
		return true
	}
	return false
}

// UncreditedBlocks counts stored blocks that are credited to no worker because they are, or may be,
// on another machine. Its methods may be called from any goroutine.
type UncreditedBlocks struct {
	remote, unspecified [5]atomic.Uint64 // by index in Media
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

// Blocks returns the number of blocks of a medium, one of Media, by locality.
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
