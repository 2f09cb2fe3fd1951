package completion

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// Event is the subject of a report.
type Event uint8

// The events that connectors report.
const (
	Received Event = iota // a decode engine's read has ended, successfully or not
	Sent                  // every reader of a prefill engine's blocks has finished; the blocks are free
	Expired               // a prefill engine's lease ended before the blocks were read; the blocks are free
	events
)

var eventNames = [events]string{"recv", "sent", "expired"}

// String returns the event's name as written in a report.
func (e Event) String() string {
	if e < events {
		return eventNames[e]
	}
	return "unknown"
}

// Report is one line from the connector (nixl/connector/sluice_connector/report.py):
//
//	SLUICE1 EVENT STATUS SLOT NONCE BYTES MICROS DPRANK/TPRANK/TPSIZE WORKER REQUEST
//
// Worker and Request borrow from the line.
type Report struct {
	Event    Event
	Failed   bool
	Bytes    int64
	Duration time.Duration
	// DPRank is the engine's data-parallel rank. TPRank is one of TPSize tensor-parallel
	// processes, each of which sends its own report.
	DPRank, TPRank, TPSize int
	Nonce                  uint64 // of the completion slot in the request; 0: it had none
	Worker, Request        []byte
}

const (
	// Prefix begins every report.
	Prefix = "SLUICE1 "
	// MaxReport is the maximum length of a report in bytes.
	MaxReport = 512
	// maxParts is the maximum TPSize: the bits of Wait.receivedParts.
	maxParts = 64
)

// ErrReport is wrapped by the errors of Parse.
var ErrReport = errors.New("completion: not a report")

// Parse parses a report. It does not allocate unless it fails.
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
			return r, fmt.Errorf("%w: want 10 fields separated by single spaces", ErrReport)
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
	// f[2], the slot, is used only by the owner of the board.
	var ok1 bool
	if r.Nonce, ok1 = nonce(f[3]); !ok1 {
		return r, fmt.Errorf("%w: nonce %q; want at most 16 hexadecimal digits, or -", ErrReport, f[3])
	}
	n, ok1 := number(f[4], 1<<62)
	us, ok2 := number(f[5], 1<<52)
	if !ok1 || !ok2 {
		return r, fmt.Errorf("%w: bytes %q, microseconds %q; want decimal numbers", ErrReport, f[4], f[5])
	}
	r.Bytes, r.Duration = n, time.Duration(us)*time.Microsecond
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

// number parses a decimal number below limit.
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

// vLLM prefixes a request's own id with the kind of the request and appends the prompt's number
// (always, but only for completions) and, since 0.14, eight random hexadecimal digits.
// engineRequestIDs removes no more than that: "r-2" and "r" are different requests.
var kinds = [...][]byte{[]byte("chatcmpl-"), completions, []byte("generate-tokens-"), []byte("resp_"), []byte("msg_")}

var completions = []byte("cmpl-")

const randomDigits = 8

// engineRequestIDs returns the request's own id for the id that an engine reports. second is
// the other candidate, when the last eight digits may be the client's or the engine's, else
// nil.
func engineRequestIDs(id []byte) (first, second []byte) {
	for _, k := range kinds {
		if rest, ok := bytes.CutPrefix(id, k); ok {
			id = rest
			if &k[0] == &completions[0] {
				if short := withoutSuffix(id, isHex, randomDigits); short != nil {
					id = short
				}
				return withoutSuffix(id, isDecimal, 0), nil
			}
			break
		}
	}
	return id, withoutSuffix(id, isHex, randomDigits)
}

// withoutSuffix removes a trailing "-" and the digits after it; n is the required number of
// digits, 0 for any. It returns nil when id has no such suffix.
func withoutSuffix(id []byte, digit func(byte) bool, n int) []byte {
	i := bytes.LastIndexByte(id, '-')
	if i <= 0 || i == len(id)-1 || n != 0 && len(id)-1-i != n {
		return nil
	}
	for _, c := range id[i+1:] {
		if !digit(c) {
			return nil
		}
	}
	return id[:i]
}

func isDecimal(c byte) bool { return c >= '0' && c <= '9' }

func isHex(c byte) bool { return isDecimal(c) || c >= 'a' && c <= 'f' }

// nonce parses one to 16 hexadecimal digits, or "-" for no nonce.
func nonce(b []byte) (n uint64, ok bool) {
	if len(b) == 1 && b[0] == '-' {
		return 0, true
	}
	for _, c := range b {
		if !isHex(c) {
			return 0, false
		}
		digit := uint64(c - '0')
		if c >= 'a' {
			digit = uint64(c-'a') + 10
		}
		n = n<<4 | digit
	}
	return n, len(b) <= 16
}
