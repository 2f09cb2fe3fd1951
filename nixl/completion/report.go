package completion

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// Event is what a report tells of.
type Event uint8

// The events.
const (
	Received Event = iota // a decode engine's pull has ended, well or not
	Sent                  // every reader of a prefill engine's blocks is done: they are free
	Expired               // a prefill engine's lease ended unread: the blocks are free
	events
)

var eventNames = [events]string{"recv", "sent", "expired"}

// String gives the event's name as it stands in a report.
func (e Event) String() string {
	if e < events {
		return eventNames[e]
	}
	return "unknown"
}

// Report is one line of the connector (nixl/connector/sluice_connector/report.py):
//
//	SLUICE1 EVENT STATUS SLOT NONCE BYTES MICROS DPRANK/TPRANK/TPSIZE WORKER REQUEST
//
// Worker and Request borrow from the line.
type Report struct {
	Event  Event
	Failed bool
	Bytes  int64
	Took   time.Duration
	// DPRank of the engine; TPRank of TPSize processes that report apart.
	DPRank, TPRank, TPSize int
	Worker, Request        []byte
}

const (
	// Prefix opens every report.
	Prefix = "SLUICE1 "
	// MaxReport bounds a report's bytes.
	MaxReport = 512
	// maxParts bounds TPSize: the bits of Wait's set.
	maxParts = 64
)

// ErrReport is wrapped by what Parse returns.
var ErrReport = errors.New("completion: not a report")

// Parse reads a report. It allocates nothing unless it fails.
func Parse(line []byte) (r Report, err error) {
	if len(line) > MaxReport {
		return r, fmt.Errorf("%w: %d bytes; want at most %d", ErrReport, len(line), MaxReport)
	}
	rest, ok := bytes.CutPrefix(line, []byte(Prefix))
	if !ok {
		return r, fmt.Errorf("%w: it does not begin with %q", ErrReport, Prefix)
	}
	var f [9][]byte
	for i := range f {
		var more bool
		f[i], rest, more = bytes.Cut(rest, []byte{' '})
		if more != (i < len(f)-1) || len(f[i]) == 0 {
			return r, fmt.Errorf("%w: want 10 fields parted by single spaces", ErrReport)
		}
	}
	r.Event = events
	for i, name := range eventNames {
		if string(f[0]) == name {
			r.Event = Event(i)
		}
	}
	switch {
	case r.Event == events:
		return r, fmt.Errorf("%w: event %q; want recv, sent or expired", ErrReport, f[0])
	case string(f[1]) == "failed":
		r.Failed = true
	case string(f[1]) != "ok":
		return r, fmt.Errorf("%w: status %q; want ok or failed", ErrReport, f[1])
	}
	// f[2] and f[3], slot and nonce, are for those who hold the board.
	n, ok1 := number(f[4], 1<<62)
	us, ok2 := number(f[5], 1<<52)
	if !ok1 || !ok2 {
		return r, fmt.Errorf("%w: bytes %q, microseconds %q; want decimal numbers", ErrReport, f[4], f[5])
	}
	r.Bytes, r.Took = n, time.Duration(us)*time.Microsecond
	dp, part, _ := bytes.Cut(f[6], []byte{'/'})
	tp, size, _ := bytes.Cut(part, []byte{'/'})
	d, ok1 := number(dp, 1<<20)
	t, ok2 := number(tp, maxParts)
	s, ok3 := number(size, maxParts+1)
	if !ok1 || !ok2 || !ok3 || t >= s {
		return r, fmt.Errorf("%w: part %q; want DPRANK/TPRANK/TPSIZE, at most %d parts", ErrReport, f[6], maxParts)
	}
	r.DPRank, r.TPRank, r.TPSize = int(d), int(t), int(s)
	r.Worker, r.Request = f[7], f[8]
	return r, nil
}

// number reads a decimal below limit.
func number(b []byte, limit int64) (n int64, ok bool) {
	if len(b) == 0 || len(b) > 19 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
		if n < 0 {
			return 0, false
		}
	}
	return n, n < limit
}

// What vLLM puts around a request's own id: the kind before it, and after it
// the prompt's number (completions) and, since 0.14, eight random hex digits.
var kinds = [...][]byte{[]byte("chatcmpl-"), []byte("cmpl-"), []byte("generate-tokens-"), []byte("resp_"), []byte("msg_")}

const maxSuffixes = 2

// bare cuts the kind off an engine's request id.
func bare(id []byte) []byte {
	for _, k := range kinds {
		if rest, ok := bytes.CutPrefix(id, k); ok {
			return rest
		}
	}
	return id
}

// shorter cuts the last "-…" off; nil when there is none.
func shorter(id []byte) []byte {
	if i := bytes.LastIndexByte(id, '-'); i > 0 {
		return id[:i]
	}
	return nil
}
