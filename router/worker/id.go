package worker

import (
	"fmt"
	"strconv"
	"strings"
)

// ID is the identity of one data-parallel rank of one worker. A worker with one
// rank is rank 0. ID is comparable and may be used as a map key.
type ID struct {
	Worker string
	Rank   uint16
}

// String gives "worker/rank", the form used in headers, logs and metrics.
func (id ID) String() string { return id.Worker + "/" + strconv.Itoa(int(id.Rank)) }

// ParseID reads what String wrote; a name without a rank is rank 0.
func ParseID(s string) (ID, error) {
	name, rank, found := strings.Cut(s, "/")
	if name == "" {
		return ID{}, fmt.Errorf("worker: cannot read id %q: the worker's name is empty; want NAME or NAME/RANK", s)
	}
	if !found {
		return ID{Worker: name}, nil
	}
	n, err := strconv.ParseUint(rank, 10, 16)
	if err != nil {
		return ID{}, fmt.Errorf("worker: cannot read id %q: rank %q is not a number from 0 to 65535", s, rank)
	}
	return ID{Worker: name, Rank: uint16(n)}, nil
}

// Slot is the dense number of an ID in this process: an index into holder sets
// and per-rank arrays. The fleet gives slots out on join, and recycles one only
// after the index has dropped all that the old holder held.
type Slot uint16

// MaxSlots bounds how many (worker, rank) pairs one router serves.
const MaxSlots = 4096

// Role says which legs of a request a worker takes.
type Role uint8

// The roles. An Aggregated worker prefills and decodes.
const (
	Aggregated Role = iota
	Prefill
	Decode
)

var roleNames = [...]string{Aggregated: "aggregated", Prefill: "prefill", Decode: "decode"}

// String gives the role's name as it stands in config, metrics and logs.
func (r Role) String() string {
	if int(r) < len(roleNames) {
		return roleNames[r]
	}
	return "role(" + strconv.Itoa(int(r)) + ")"
}

// ParseRole reads a role's name.
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

// State is where a worker stands in its life. Only Ready workers are chosen.
type State uint8

// The states of a worker.
const (
	Joining   State = iota // known, not yet probed with success
	Ready                  // takes requests
	Unhealthy              // failed probes or traffic; probed until it answers again
	Draining               // finishes what it has, takes nothing new
	Gone                   // removed; its slots are being recycled
)

var stateNames = [...]string{"joining", "ready", "unhealthy", "draining", "gone"}

// String gives the state's name as it stands in metrics, logs and the console.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "state(" + strconv.Itoa(int(s)) + ")"
}

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
