package kvevents

import (
	"errors"
	"fmt"
	"math"
)

// Load is what an engine says of the load of one of its ranks.
type Load struct {
	Rank    int // data-parallel rank; -1 where the message leaves it to its socket
	Running int // requests in the batch
	Waiting int // requests in the queue
	// QueuedTokens are the prompt tokens that the waiting requests have still to
	// compute, those of requests put back into the queue included; -1 where the
	// engine does not say.
	QueuedTokens int
	Usage        float64 // share of KV blocks in use, 0…1; -1 where it does not say
}

var errNoLoad = errors.New("neither a load stat, a load snapshot nor forward-pass metrics")

const (
	// loadStat is the tag of SGLang's load messages.
	loadStat = "LoadStat"
	// forwardPassVersion is the version of forward-pass metrics that is known.
	forwardPassVersion = 1
)

// DecodeLoads adds to dst what a message says of the load of ranks, one Load for
// each. A message is one of the following, or an array of them, one for each rank;
// an empty array is an engine that has no rank to speak of, and no error.
//
//   - SGLang's LoadStat, which its load socket publishes (0.5.20 … 0.5.23,
//     load_publisher.py): an array that begins with its name. What newer releases
//     add at its end is passed over.
//   - SGLang's LoadSnapshot (load_snapshot.py), of which LoadStat is a part, for who
//     passes it on: a map with dp_rank, num_running_reqs, num_waiting_reqs,
//     num_waiting_uncached_tokens, token_usage and more; what is zero is left out.
//   - Dynamo 1.6's ForwardPassMetrics (forward_pass_metrics.py): a map with version,
//     dp_rank, scheduled_requests and queued_requests, maps of num_prefill_requests,
//     sum_prefill_tokens, num_decode_requests and more.
//
// Fields that are not known are passed over.
func DecodeLoads(dst []Load, msg []byte) ([]Load, error) {
	r := reader{b: msg}
	from := len(dst)
	err := r.loads(&dst)
	if err == nil && len(r.b) > 0 {
		err = fmt.Errorf("%d bytes stand behind it", len(r.b))
	}
	if err != nil {
		return dst[:from], fmt.Errorf("kvevents: cannot read a load message: %w", err)
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

// oneLoad reads the message of one rank, which begins with c.
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

// loadStat reads a LoadStat of which only the array's header is read: its name,
// running, waiting, tokens in use, tokens there is room for, rank or nil, tokens
// waiting to be computed, and more. The first six are there in every release.
func (r *reader) loadStat(dst *[]Load, n int) error {
	if n < 6 {
		return fmt.Errorf("an array of %d, want one that begins with %q and six values at least", n, loadStat)
	}
	name, err := r.text()
	if err != nil {
		return err
	}
	if string(name) != loadStat {
		return fmt.Errorf("found %.40q, want %q: %w", name, loadStat, errNoLoad)
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
				return fmt.Errorf("forward-pass metrics of version %d, want %d", v, forwardPassVersion)
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
		l.QueuedTokens = -1 // each has a token to compute at least: a release that does not tell them
	}
	if !passes && l.Usage < 0 {
		l.Usage = 0 // left out because it is zero
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
		case "sum_prefill_tokens", "sum_decode_kv_tokens": // a decode that was put back is computed again
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
