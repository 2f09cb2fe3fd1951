package kvevents

import (
	"errors"
	"fmt"
	"math"
)

// Load is the load that an engine reports for one of its ranks.
type Load struct {
	Rank    int // data-parallel rank; -1 if the message does not name it and the socket implies it
	Running int // requests in the batch
	Waiting int // requests in the queue
	// QueuedTokens is the number of prompt tokens that the waiting requests still have to compute,
	// including preempted requests; -1 if the engine does not report it.
	QueuedTokens int
	Usage        float64 // fraction of KV blocks in use, 0…1; -1 if not reported
}

var errNoLoad = errors.New("want a LoadStat, a LoadSnapshot or forward-pass metrics")

const (
	// loadStat is the tag of SGLang's load messages.
	loadStat = "LoadStat"
	// forwardPassVersion is the supported version of forward-pass metrics.
	forwardPassVersion = 1
)

// DecodeLoads appends to dst the Loads in a message, one per rank. A message is one of the
// following, or an array of them, one per rank. An empty array comes from an engine without ranks
// and is not an error.
//
//   - SGLang's LoadStat, which its load socket publishes (0.5.20 … 0.5.23,
//     load_publisher.py): an array that begins with its name. Elements that newer
//     releases append are skipped.
//   - SGLang's LoadSnapshot (load_snapshot.py), of which LoadStat is a part, for
//     programs that forward it: a map with dp_rank, num_running_reqs,
//     num_waiting_reqs, num_waiting_uncached_tokens, token_usage and more; zero
//     values are omitted.
//   - Dynamo 1.6's ForwardPassMetrics (forward_pass_metrics.py): a map with version,
//     dp_rank, scheduled_requests and queued_requests, maps of num_prefill_requests,
//     sum_prefill_tokens, num_decode_requests and more.
//
// Unknown fields are skipped.
func DecodeLoads(dst []Load, msg []byte) ([]Load, error) {
	r := reader{b: msg}
	from := len(dst)
	err := r.loads(&dst)
	if err == nil && len(r.b) > 0 {
		err = fmt.Errorf("%d bytes after the message", len(r.b))
	}
	if err != nil {
		return dst[:from], fmt.Errorf("kvevents: cannot decode a load message: %w", err)
	}
	return dst, nil
}

// loads reads one message or an array of them.
func (r *reader) loads(dst *[]Load) error {
	c, err := r.lead()
	if err != nil {
		return err
	}
	if !isArray(c) {
		return r.oneLoad(dst, c)
	}
	n, err := r.array()
	if err != nil {
		return err
	}
	if n > 0 {
		if c, err = r.lead(); err != nil {
			return err
		}
		if isText(c) {
			return r.loadStat(dst, n)
		}
	}
	for range n {
		if r.null() {
			continue
		}
		if c, err = r.lead(); err != nil {
			return err
		}
		if err = r.oneLoad(dst, c); err != nil {
			return err
		}
	}
	return nil
}

func isArray(c byte) bool { return c&0xf0 == 0x90 || c == 0xdc || c == 0xdd }

func isText(c byte) bool { return c&0xe0 == 0xa0 || c >= 0xd9 && c <= 0xdb }

// oneLoad reads the message of one rank, whose first byte is c.
func (r *reader) oneLoad(dst *[]Load, c byte) error {
	if isArray(c) {
		n, err := r.array()
		if err != nil {
			return err
		}
		return r.loadStat(dst, n)
	}
	var l Load
	if err := r.load(&l); err != nil {
		return err
	}
	*dst = append(*dst, l)
	return nil
}

// loadStat reads a LoadStat after its array header: name, running, waiting, used tokens, token
// capacity, rank or nil, tokens waiting to be computed, and more. The first six are present in
// every release.
func (r *reader) loadStat(dst *[]Load, n int) error {
	if n < 6 {
		return fmt.Errorf("array has %d elements; want %q and at least six values", n, loadStat)
	}
	name, err := r.text()
	if err != nil {
		return err
	}
	if string(name) != loadStat {
		return fmt.Errorf("array begins with %.40q; want %q: %w", name, loadStat, errNoLoad)
	}
	l := Load{Rank: -1, QueuedTokens: -1, Usage: -1}
	used, capacity := 0, 0
	for i := 1; i < n; i++ {
		switch i {
		case 1:
			l.Running, err = r.small()
		case 2:
			l.Waiting, err = r.small()
		case 3:
			used, err = r.small()
		case 4:
			capacity, err = r.small()
		case 5:
			if !r.null() {
				l.Rank, err = r.small()
			}
		case 6:
			l.QueuedTokens, err = r.small()
		default:
			err = r.skip()
		}
		if err != nil {
			return err
		}
	}
	if capacity > 0 {
		l.Usage = min(float64(used)/float64(capacity), 1)
	}
	*dst = append(*dst, l)
	return nil
}

func (r *reader) load(l *Load) error {
	*l = Load{Usage: -1}
	passes, known := false, false
	n, err := r.dict()
	if err != nil {
		return err
	}
	for range n {
		key, err := r.text()
		if err != nil {
			return err
		}
		to := (*int)(nil)
		switch string(key) {
		case "version":
			v, err := r.small()
			if err != nil {
				return err
			}
			if v != forwardPassVersion {
				return fmt.Errorf("forward-pass metrics have version %d; want %d", v, forwardPassVersion)
			}
			continue
		case "dp_rank":
			to = &l.Rank
		case "num_running_reqs":
			to, known = &l.Running, true
		case "num_waiting_reqs":
			to, known = &l.Waiting, true
		case "num_waiting_uncached_tokens":
			to, known = &l.QueuedTokens, true
		case "token_usage":
			known = true
			if l.Usage, err = r.timestamp(); err != nil {
				return err
			}
			if math.IsNaN(l.Usage) || l.Usage < 0 {
				l.Usage = -1
			}
			l.Usage = min(l.Usage, 1)
			continue
		case "scheduled_requests":
			passes = true
			if err := r.requests(&l.Running, nil); err != nil {
				return err
			}
			continue
		case "queued_requests":
			passes = true
			if err := r.requests(&l.Waiting, &l.QueuedTokens); err != nil {
				return err
			}
			continue
		case "timestamp", "max_total_num_tokens":
			known = true
		}
		if to == nil {
			err = r.skip()
		} else {
			*to, err = r.small()
		}
		if err != nil {
			return err
		}
	}
	if !passes && !known {
		return errNoLoad
	}
	if !passes && l.Waiting > 0 && l.QueuedTokens == 0 {
		l.QueuedTokens = -1 // each waiting request has at least one token: this release does not report them
	}
	if !passes && l.Usage < 0 {
		l.Usage = 0 // omitted because it is zero
	}
	return nil
}

// requests adds the counts of one of the two maps of forward-pass metrics.
func (r *reader) requests(count, tokens *int) error {
	if r.null() {
		return nil
	}
	n, err := r.dict()
	if err != nil {
		return err
	}
	for range n {
		key, err := r.text()
		if err != nil {
			return err
		}
		v := 0
		switch string(key) {
		case "num_prefill_requests", "num_decode_requests":
			v, err = r.small()
			*count += v
		case "sum_prefill_tokens", "sum_decode_kv_tokens": // a preempted decode is computed again
			v, err = r.small()
			if tokens != nil {
				*tokens += v
			}
		default:
			err = r.skip()
		}
		if err != nil {
			return err
		}
	}
	return nil
}
