package worker

import (
	"fmt"
	"strconv"
	"strings"
)

// ID identifies one data-parallel rank of one worker. A worker with one rank has rank 0. ID is
// comparable and may be used as a map key.
type ID struct {
	Worker string
	Rank   uint16
}

// String returns "worker/rank", the form used in headers, logs and metrics.
func (id ID) String() string { return id.Worker + "/" + strconv.Itoa(int(id.Rank)) }

// ParseID parses the form that String returns; a name without a rank is rank 0.
func ParseID(s string) (ID, error) {
	name, rank, found := strings.Cut(s, "/")
	if name == "" {
		return ID{}, fmt.Errorf("worker: cannot parse id %q: the worker's name is empty; want NAME or NAME/RANK", s)
	}
	if !found {
		return ID{Worker: name}, nil
	}
	n, err := strconv.ParseUint(rank, 10, 16)
	if err != nil {
		return ID{}, fmt.Errorf("worker: cannot parse id %q: rank %q is not a number from 0 to 65535", s, rank)
	}
	return ID{Worker: name, Rank: uint16(n)}, nil
}

// Slot is the dense number of an ID in this process: an index into holder sets and per-rank arrays.
// The fleet assigns a slot on join and reuses it only after the index has dropped all blocks of the
// previous rank.
type Slot uint16

// MaxSlots bounds the (worker, rank) pairs of one router.
const MaxSlots = 4096

// Role is the set of legs that a worker serves.
type Role uint8

// The roles. An Aggregated worker prefills and decodes.
const (
	Aggregated Role = iota
	Prefill
	Decode
)

var roleNames = [...]string{Aggregated: "aggregated", Prefill: "prefill", Decode: "decode"}

// String returns the role's name as it appears in configuration, metrics and logs.
func (r Role) String() string {
	if int(r) < len(roleNames) {
		return roleNames[r]
	}
	return "role(" + strconv.Itoa(int(r)) + ")"
}

// ParseRole parses a role's name.
func ParseRole(s string) (Role, error) {
	for r, name := range roleNames {
		if s == name {
			return Role(r), nil
		}
	}
	return 0, fmt.Errorf("worker: unknown role %q; want prefill, decode or aggregated", s)
}

// MarshalText implements encoding.TextMarshaler.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Role) UnmarshalText(b []byte) (err error) { *r, err = ParseRole(string(b)); return err }

// State is the life-cycle state of a worker. Only Ready workers are chosen.
type State uint8

// The states of a worker.
const (
	Joining   State = iota // known, not yet probed successfully
	Ready                  // accepts requests
	Unhealthy              // failed probes or traffic; probed until it answers again
	Draining               // finishes running requests, accepts no new ones
	Gone                   // removed; its slots are being recycled
)

var stateNames = [...]string{"joining", "ready", "unhealthy", "draining", "gone"}

// String returns the state's name as it appears in metrics, logs and the console.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "state(" + strconv.Itoa(int(s)) + ")"
}

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
