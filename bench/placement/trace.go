package placement

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"sluice/router/blockhash"
)

// Trace is a list of requests in the order of their arrival.
type Trace struct {
	Name        string
	BlockTokens int // tokens per block
	Requests    []Request

	// Set by number: the block of each number.
	numbered sync.Once
	seqs     []blockhash.Seq
}

// Request is one request of a Trace.
type Request struct {
	At     time.Duration
	Prompt int // tokens
	Output int // tokens, at least 1
	// Blocks are the prompt's full blocks. Equal values are equal blocks with equal blocks before
	// them.
	Blocks []blockhash.Seq
	// Generated are the full blocks that the output adds. The next prompt of a conversation may
	// begin with them.
	Generated []blockhash.Seq
	// Class is the index of the priority class in QueueOptions.Classes. Tenant shares its turn.
	Class  int
	Tenant string

	numbers []int32 // of Blocks and then of Generated, see Trace.number
}

// mooncakeBlock is the number of tokens that one hash id of a Mooncake trace stands for.
const mooncakeBlock = 512

// maxPrompt bounds the prompt of one line of a trace, in tokens.
const maxPrompt = 4_000_000

// mooncakeLine is one line of a trace in the format of Mooncake's FAST'25 release: arrival in ms,
// lengths in tokens, and an id for each block of the prompt, the last of which may be incomplete.
type mooncakeLine struct {
	Timestamp    float64  `json:"timestamp"`
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

// ReadTrace reads a trace in Mooncake's format. Its ids name a block together with all before it.
func ReadTrace(path string) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("placement: cannot read the trace: %w", err)
	}
	defer f.Close()
	t := &Trace{Name: "real", BlockTokens: mooncakeBlock}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 16<<20)
	first := 0.0
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var l mooncakeLine
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("placement: cannot read %q: line %d is not a request: %w", path, n, err)
		}
		full := l.InputLength / mooncakeBlock
		if l.InputLength < 1 || l.InputLength > maxPrompt || l.OutputLength < 0 || l.OutputLength > maxPrompt || len(l.HashIDs) < full {
			return nil, fmt.Errorf("placement: cannot read %q: line %d has input_length %d, output_length %d and %d hash_ids; want 1 to %d, 0 to %d, and one id for each %d tokens",
				path, n, l.InputLength, l.OutputLength, len(l.HashIDs), maxPrompt, maxPrompt, mooncakeBlock)
		}
		if len(t.Requests) == 0 {
			first = l.Timestamp
		}
		r := Request{At: time.Duration((l.Timestamp - first) * float64(time.Millisecond)), Prompt: l.InputLength, Output: max(1, l.OutputLength)}
		for _, id := range l.HashIDs[:full] {
			r.Blocks = append(r.Blocks, blockhash.Seq(mix(id+1)))
		}
		// The format has no ids for outputs: nothing will ask for these blocks, but they use space.
		for i := range (l.InputLength+r.Output)/mooncakeBlock - full {
			r.Generated = append(r.Generated, blockhash.Seq(mix(1<<63|uint64(n)<<20|uint64(i))))
		}
		t.Requests = append(t.Requests, r)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("placement: cannot read %q: %w", path, err)
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("placement: cannot read %q: it has no request", path)
	}
	return t, nil
}

// mix spreads an id over 64 bits, as a hash would be.
func mix(z uint64) uint64 {
	z += 0x9E3779B97F4A7C15
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return z ^ (z >> 31)
}

// number gives each block of the trace a number from 0, with which caches look it up.
func (t *Trace) number() {
	t.numbered.Do(func() {
		known := map[blockhash.Seq]int32{}
		for i := range t.Requests {
			q := &t.Requests[i]
			q.numbers = make([]int32, 0, len(q.Blocks)+len(q.Generated))
			for _, blocks := range [][]blockhash.Seq{q.Blocks, q.Generated} {
				for _, s := range blocks {
					n, ok := known[s]
					if !ok {
						n = int32(len(t.seqs))
						known[s] = n
						t.seqs = append(t.seqs, s)
					}
					q.numbers = append(q.numbers, n)
				}
			}
		}
	})
}

// seqsOf returns the blocks of numbers.
func (t *Trace) seqsOf(numbers []int32) []blockhash.Seq {
	s := make([]blockhash.Seq, len(numbers))
	for i, n := range numbers {
		s[i] = t.seqs[n]
	}
	return s
}

// promptTokens is the number of prompt tokens of all requests.
func (t *Trace) promptTokens() (n int) {
	for i := range t.Requests {
		n += t.Requests[i].Prompt
	}
	return n
}

// span is the time from the first to the last request.
func (t *Trace) span() time.Duration {
	return t.Requests[len(t.Requests)-1].At - t.Requests[0].At
}
