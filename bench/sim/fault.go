package sim

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

// FaultKind is what goes wrong.
type FaultKind uint8

// The kinds. Those with "after" act on a stream once Fault.After events are out
// (a non-streaming answer counts its tokens).
const (
	Refuse     FaultKind = iota // the client ports refuse and their connections end, until ClearFaults or Fault.Delay has passed
	Status                      // an error answer with Fault.Status (503) in vLLM's shape
	Stall                       // no byte: before the head when After is 0, else after that many events; for Fault.Delay, or for ever
	Reset                       // TCP reset: before the head when After is 0, else after
	Cut                         // the body ends early with FIN, no last chunk, after; a whole answer does not come, or with Phase "body" in part
	StreamFail                  // an SSE error event and [DONE], after; status 500 when not streaming
	Slow                        // Fault.Delay before every token
	Garbage                     // 200 with a body that is no JSON
	Dead                        // the engine dies: 500 for all, then the port refuses
	LoseEvents                  // the next N KV event batches are not published live, replay has them
	BadHandle                   // prefill answers a handle without block ids
	NoHandle                    // prefill answers a null handle
)

var faultKinds = [...]string{"refuse", "status", "stall", "reset", "cut", "streamfail", "slow", "garbage", "dead", "loseevents", "badhandle", "nohandle"}

func (k FaultKind) String() string {
	if int(k) < len(faultKinds) {
		return faultKinds[k]
	}
	return "fault(" + strconv.Itoa(int(k)) + ")"
}

// Fault is one thing to go wrong and where. Zero selectors match everything.
type Fault struct {
	Kind FaultKind
	Path string // prefix of the request's path; "" is every inference endpoint (not health, metrics, models, …)
	// Leg is "prefill", "decode" or "plain" (neither) by what the request asks
	// for; "" any of them. "handover" is the KV transfer itself, on the engine that
	// reads (NIXL, Mooncake) or on either (SGLang): a Stall or Slow lasts Delay, any
	// other kind makes it fail. "bootstrap" is a call of the bootstrap server.
	Leg string
	// Phase is "" as the kind says; "body": not before the head is out, when After is 0 before the
	// first event; "role": of a stream, behind the event that tells the role, before any token.
	// "answer", of a Stall only: the engine core has finished the request, with what it keeps
	// for decode, and the API server holds the whole answer back. A client that leaves then
	// loses the answer; the core has nothing left to abort.
	Phase  string
	ID     string        // prefix of X-Request-Id, or of a body's rid
	Body   string        // the body contains it
	N      int           // how many requests it hits, 0 without end
	Skip   int           // how many matching requests pass first
	P      float64       // probability, 0 means always
	Status int           // of Status, 0 means 503
	Delay  time.Duration // real time; of Stall, Slow, Refuse
	After  int           // events that still get out
	// Until, closed, ends a Stall before the head or of the answer early: what a test does
	// meanwhile takes a busy machine as long as it likes. nil never does.
	Until <-chan struct{}
}

// ParseFault reads "kind=status,path=/v1/,leg=prefill,n=3,status=503,…".
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
			i := slices.Index(faultKinds[:], v)
			if i < 0 {
				return f, fmt.Errorf("sim: cannot read fault %q: kind %q is none of %s", s, v, strings.Join(faultKinds[:], ", "))
			}
			f.Kind, kind = FaultKind(i), true
		case "path":
			f.Path = v
		case "leg":
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
			return f, fmt.Errorf("sim: cannot read fault %q: key %q is none of kind, path, leg, phase, id, body, n, skip, p, status, delay, after", s, k)
		}
		if err != nil {
			return f, fmt.Errorf("sim: cannot read fault %q: value of %s: %w", s, k, err)
		}
	}
	if !kind {
		return f, fmt.Errorf("sim: cannot read fault %q: kind is missing; want one of %s", s, strings.Join(faultKinds[:], ", "))
	}
	return f, nil
}

var faultPhases = []string{"body", "role", "answer"}

var faultLegs = []string{"prefill", "decode", "plain", "handover", "bootstrap"}

// hits says whether the request is one the fault is for.
func (f *Fault) hits(r *httpRequest, leg string, inference bool) bool {
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
	if f.ID != "" && !strings.HasPrefix(header(r, "X-Request-Id"), f.ID) && !bytes.Contains(r.body, []byte(`"rid":"`+f.ID)) {
		return false
	}
	return strings.HasPrefix(r.path, f.Path) && bytes.Contains(r.body, []byte(f.Body))
}

// faultSet is what is armed. Faults are tried in the order they came.
type faultSet struct {
	mu   sync.Mutex
	list []*Fault
	rng  *rand.Rand
	hits int64
}

func newFaultSet(seed uint64) *faultSet {
	return &faultSet{rng: rand.New(rand.NewPCG(seed, 0x5a17))}
}

func (s *faultSet) add(f Fault) {
	s.mu.Lock()
	s.list = append(s.list, &f)
	s.mu.Unlock()
}

func (s *faultSet) clear() {
	s.mu.Lock()
	s.list = nil
	s.mu.Unlock()
}

// match gives the fault that hits this request, if any.
func (s *faultSet) match(r *httpRequest, leg string, inference bool) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, f := range s.list {
		if !f.hits(r, leg, inference) {
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

// loseBatch says whether the next KV event batch is to be lost.
func (s *faultSet) loseBatch() bool {
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
