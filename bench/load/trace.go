package load

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"
)

// traceBlock is the number of tokens of one hash id in a Mooncake trace.
const traceBlock = 512

// traceLine is one request of the trace: arrival in milliseconds, lengths in tokens,
// and an id for each block of the prompt; equal ids are equal blocks.
type traceLine struct {
	Timestamp    float64  `json:"timestamp"`
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
	// Extensions of Mooncake's format.
	Session string `json:"session"` // sent as X-Sluice-Session
	Source  string `json:"source"`  // name of the source; may be missing if there is only one
}

// maxTraceInput limits the prompt of one line, so that an unsuitable file cannot ask
// for a terabyte.
const maxTraceInput = 4_000_000

// trace replays a file line by line; it holds only one line at a time.
type trace struct {
	o     *Options
	srcs  []Source
	file  *os.File
	lines *bufio.Scanner
	line  int
	first float64
	n     int
	err   error
}

func openTrace(o *Options, sources []Source) (*trace, error) {
	f, err := os.Open(o.Trace)
	if err != nil {
		return nil, fmt.Errorf("load: cannot replay %q: %w", o.Trace, err)
	}
	t := &trace{o: o, srcs: sources, file: f, lines: bufio.NewScanner(f)}
	t.lines.Buffer(make([]byte, 64<<10), 16<<20)
	return t, nil
}

func (t *trace) next() (Job, bool) {
	if t.err != nil || t.o.Requests > 0 && t.n >= t.o.Requests {
		t.file.Close()
		return Job{}, false
	}
	for t.lines.Scan() {
		t.line++
		if len(t.lines.Bytes()) == 0 {
			continue
		}
		var l traceLine
		if err := json.Unmarshal(t.lines.Bytes(), &l); err != nil {
			t.err = fmt.Errorf("line %d is not a request: %w", t.line, err)
			return t.next()
		}
		if l.InputLength < 1 || l.InputLength > maxTraceInput || l.OutputLength < 0 {
			t.err = fmt.Errorf("line %d: input_length %d, output_length %d; want 1 to %d, and 0 or more", t.line, l.InputLength, l.OutputLength, maxTraceInput)
			return t.next()
		}
		if len(l.Session) > 256 || strings.ContainsFunc(l.Session, func(r rune) bool { return r <= ' ' || r > '~' }) {
			t.err = fmt.Errorf("line %d: session %q; want at most 256 visible ASCII characters", t.line, l.Session)
			return t.next()
		}
		src := slices.IndexFunc(t.srcs, func(s Source) bool { return s.Name == l.Source })
		if src < 0 && l.Source == "" && len(t.srcs) == 1 {
			src = 0
		}
		if src < 0 {
			t.err = fmt.Errorf("line %d: source %q; want the name of a --source", t.line, l.Source)
			return t.next()
		}
		if t.n == 0 {
			t.first = l.Timestamp
		}
		t.n++
		out := max(1, l.OutputLength)
		due := time.Duration((l.Timestamp - t.first) / t.o.TraceSpeed * float64(time.Millisecond))
		return Job{Due: due, Body: render(t.o, t.srcs[src].Priority, blockTokens(l), out), Tokens: l.InputLength, Output: out, Session: l.Session, source: src}, true
	}
	if err := t.lines.Err(); err != nil {
		t.err = fmt.Errorf("line %d: %w", t.line+1, err)
	}
	t.file.Close()
	return Job{}, false
}

// blockTokens makes the prompt of a line: the tokens of a block are a function of its
// id, and the last block is truncated to the line's length.
func blockTokens(l traceLine) []uint32 {
	tokens := make([]uint32, 0, l.InputLength)
	for i := 0; len(tokens) < l.InputLength; i++ {
		id := uint64(1<<40 + i)
		if i < len(l.HashIDs) {
			id = l.HashIDs[i]
		}
		rng := rand.New(rand.NewPCG(id, 0xb10c))
		for j := 0; j < traceBlock && len(tokens) < l.InputLength; j++ {
			tokens = append(tokens, uint32(rng.IntN(1<<16)))
		}
	}
	return tokens
}
