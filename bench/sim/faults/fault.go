package faults

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Kind is what goes wrong.
type Kind uint8

// The kinds. "After" means: once Fault.After events of a stream are written. A
// response that is not streamed counts its tokens instead.
const (
	Refuse     Kind = iota // the client ports refuse connections and existing ones end, until ClearFaults or for Fault.Delay
	Status                 // an error response with Fault.Status (503) in vLLM's format
	Stall                  // no byte for Fault.Delay, or without end: before the head if After is 0, else after
	Reset                  // TCP reset: before the head if After is 0, else after
	Truncate               // the body ends early with FIN and no last chunk, after; a whole response is missing, or partial with Phase "body"
	StreamFail             // an SSE error event and [DONE], after; status 500 if the response is not streamed
	Slow                   // Fault.Delay before every token
	Malformed              // 200 with a body that is not JSON
	Crash                  // the engine crashes: 500 for all requests, then the port refuses connections
	LoseEvents             // the next N KV event batches are not published live; replay has them
	BadHandle              // prefill returns a handle without block ids
	NoHandle               // prefill returns a null handle
)

var kindNames = [...]string{"refuse", "status", "stall", "reset", "truncate", "streamfail", "slow", "malformed", "crash", "loseevents", "badhandle", "nohandle"}

// formerNames are deprecated names of kinds and legs, which ParseFault accepts for one release.
var formerNames = map[string]string{"cut": "truncate", "garbage": "malformed", "dead": "crash", "plain": "whole"}

// currentName returns the name that replaces a deprecated one.
func currentName(name string) string {
	if now := formerNames[name]; now != "" {
		return now
	}
	return name
}

// DeprecatedNames returns one warning for each deprecated name in a fault that ParseFault accepts.
func DeprecatedNames(s string) []string {
	var warnings []string
	for part := range strings.SplitSeq(s, ",") {
		k, v, _ := strings.Cut(part, "=")
		if now := currentName(v); now != v && (k == "kind" || k == "leg") {
			warnings = append(warnings, fmt.Sprintf("--fault %s=%s is now named %s=%s; the old name is accepted in this release only", k, v, k, now))
		}
	}
	return warnings
}

// KindNames returns the names of the kinds, as ParseFault accepts them.
func KindNames() []string { return kindNames[:] }

// String returns the name of the kind, as ParseFault accepts it.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "fault(" + strconv.Itoa(int(k)) + ")"
}

// Fault is one thing to go wrong, and where. Zero selectors match everything.
type Fault struct {
	Kind Kind
	Path string // prefix of the request's path; "" is every inference endpoint (not health, metrics, models and the like)
	// Leg is "prefill", "decode" or "whole" (neither), as the request asks for; ""
	// matches all three. "handover" is the KV transfer itself, on the engine that reads
	// (NIXL, Mooncake) or on either (SGLang): a Stall or Slow lasts Delay, any other kind
	// makes it fail. "bootstrap" is a call of the bootstrap server.
	Leg string
	// Phase delays the fault. "" is as the kind says. "body" is not before the head is
	// written; with After 0, before the first event. "role" is behind the event of a
	// stream that names the role, before any token. "answer", for Stall only: the engine
	// core has finished the request, with what it keeps for decode, and the API server
	// holds back the whole response. A client that disconnects then loses the response,
	// and the core has nothing left to abort.
	Phase  string
	ID     string        // prefix of X-Request-Id, or of a body's rid
	Body   string        // text that the body contains
	N      int           // number of requests it hits; 0 is unlimited
	Skip   int           // number of matching requests that pass first
	P      float64       // probability; 0 means always
	Status int           // for kind Status; 0 means 503
	Delay  time.Duration // real time; for Stall, Slow and Refuse
	After  int           // events that are still written
	// Until ends a Stall before the head or of the answer early when it is closed. A
	// test uses it to act during the stall, however slow the machine is. nil never ends it.
	Until <-chan struct{}
}

// ParseFault reads a fault from "kind=status,path=/v1/,leg=prefill,n=3,status=503".
func ParseFault(s string) (Fault, error) {
	var f Fault
	kind := false
	for part := range strings.SplitSeq(s, ",") {
		k, v, ok := strings.Cut(part, "=")
		if !ok {
			return f, fmt.Errorf("sim: cannot read fault %q: %q is not key=value", s, part)
		}
		var err error
		switch k {
		case "kind":
			i := slices.Index(kindNames[:], currentName(v))
			if i < 0 {
				return f, fmt.Errorf("sim: cannot read fault %q: kind %q is not one of %s", s, v, strings.Join(kindNames[:], ", "))
			}
			f.Kind, kind = Kind(i), true
		case "path":
			f.Path = v
		case "leg":
			v = currentName(v)
			if !slices.Contains(faultLegs, v) {
				err = fmt.Errorf("want %s", strings.Join(faultLegs, ", "))
			}
			f.Leg = v
		case "phase":
			if !slices.Contains(faultPhases, v) {
				err = fmt.Errorf("want %s", strings.Join(faultPhases, ", "))
			}
			f.Phase = v
		case "id":
			f.ID = v
		case "body":
			f.Body = v
		case "n":
			f.N, err = strconv.Atoi(v)
		case "skip":
			f.Skip, err = strconv.Atoi(v)
		case "p":
			f.P, err = strconv.ParseFloat(v, 64)
		case "status":
			f.Status, err = strconv.Atoi(v)
			if err == nil && (f.Status < 400 || f.Status > 599) {
				err = fmt.Errorf("want 400 to 599")
			}
		case "delay":
			f.Delay, err = time.ParseDuration(v)
		case "after":
			f.After, err = strconv.Atoi(v)
		default:
			return f, fmt.Errorf("sim: cannot read fault %q: key %q is not one of kind, path, leg, phase, id, body, n, skip, p, status, delay, after", s, k)
		}
		if err != nil {
			return f, fmt.Errorf("sim: cannot read fault %q: value of %s: %w", s, k, err)
		}
	}
	if !kind {
		return f, fmt.Errorf("sim: cannot read fault %q: kind is missing; want one of %s", s, strings.Join(kindNames[:], ", "))
	}
	return f, nil
}

var faultPhases = []string{"body", "role", "answer"}

var faultLegs = []string{"prefill", "decode", "whole", "handover", "bootstrap"}

// Request is what a fault selects a request by.
type Request struct {
	Path string
	ID   string // the header X-Request-Id
	Body []byte
}

// selects reports whether the fault is for the request.
func (f *Fault) selects(r Request, leg string, inference bool) bool {
	switch {
	case f.Kind == Refuse || f.Kind == LoseEvents:
		return false
	case leg == "handover" || leg == "bootstrap":
		if f.Leg != leg {
			return false
		}
	case f.Leg != "" && f.Leg != leg || f.Path == "" && !inference:
		return false
	}
	if f.ID != "" && !strings.HasPrefix(r.ID, f.ID) && !bytes.Contains(r.Body, []byte(`"rid":"`+f.ID)) {
		return false
	}
	return strings.HasPrefix(r.Path, f.Path) && bytes.Contains(r.Body, []byte(f.Body))
}

// Set is the armed faults of an engine, tried in the order in which they were added.
// It is safe for concurrent use.
type Set struct {
	mu   sync.Mutex
	list []*Fault
	rng  *rand.Rand
	hits int
}

// NewSet returns an empty set. Equal seeds give equal choices of Fault.P.
func NewSet(seed uint64) *Set {
	return &Set{rng: rand.New(rand.NewPCG(seed, 0x5a17))}
}

// Add arms a fault.
func (s *Set) Add(f Fault) {
	s.mu.Lock()
	s.list = append(s.list, &f)
	s.mu.Unlock()
}

// Clear disarms all faults.
func (s *Set) Clear() {
	s.mu.Lock()
	s.list = nil
	s.mu.Unlock()
}

// Hits returns the number of requests and KV event batches that a fault has hit.
func (s *Set) Hits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hits
}

// Match returns the fault that hits this request, or nil. leg is as in Fault.Leg;
// inference says that the path is an inference endpoint. A match counts against
// Fault.Skip and Fault.N.
func (s *Set) Match(r Request, leg string, inference bool) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, f := range s.list {
		if !f.selects(r, leg, inference) {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		if f.P > 0 && s.rng.Float64() >= f.P {
			continue
		}
		hit := *f
		if f.N > 0 {
			if f.N--; f.N == 0 {
				s.list = slices.Delete(s.list, i, i+1)
			}
		}
		s.hits++
		return &hit
	}
	return nil
}

// LoseBatch reports whether a fault drops the next KV event batch.
func (s *Set) LoseBatch() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, f := range s.list {
		if f.Kind != LoseEvents {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			return false
		}
		if f.N > 0 {
			if f.N--; f.N == 0 {
				s.list = slices.Delete(s.list, i, i+1)
			}
		}
		s.hits++
		return true
	}
	return false
}
