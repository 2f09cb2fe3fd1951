package kvevents

import (
	"errors"
	"fmt"
	"math"
)

// Load is what an engine says of the load of one of its ranks.
type Load struct {
	Rank    int // data-parallel rank; 0 where the engine names none
	Running int // requests in the batch
	Waiting int // requests in the queue
	// QueuedTokens are the prompt tokens that the waiting requests have still to
	// compute, -1 where the engine does not say.
	QueuedTokens int
	Usage        float64 // share of KV blocks in use, 0…1; -1 where it does not say
}

var errNoLoad = errors.New("neither a load snapshot nor forward-pass metrics")

// DecodeLoads adds to dst what a message says of the load of ranks, one Load for
// each. A message is one of the following, or an array of them, one for each rank;
// an empty array is an engine that has no rank to speak of, and no error.
//
//   - SGLang's LoadSnapshot, which its load socket publishes: a map with dp_rank,
//     num_running_reqs, num_waiting_reqs, num_waiting_uncached_tokens, token_usage
//     and more; what is zero is left out.
//   - Dynamo 1.6's ForwardPassMetrics: a map with dp_rank, scheduled_requests and
//     queued_requests, maps of num_prefill_requests, sum_prefill_tokens,
//     num_decode_requests and more.
//
// Fields that are not known are passed over.
func DecodeLoads(dst []Load, msg []byte) ([]Load, error) {
	r := reader{b: msg}
	c, err := r.lead()
	if err != nil {
		return dst, err
	}
	n := 1
	if c&0xf0 == 0x90 || c == 0xdc || c == 0xdd {
		if n, err = r.array(); err != nil {
			return dst, err
		}
	}
	from := len(dst)
	for range n {
		if r.null() {
			continue
		}
		var l Load
		if err := r.load(&l); err != nil {
			return dst[:from], fmt.Errorf("kvevents: cannot read a load message: %w", err)
		}
		dst = append(dst, l)
	}
	if len(r.b) > 0 {
		return dst[:from], fmt.Errorf("kvevents: cannot read a load message: %d bytes stand behind it", len(r.b))
	}
	return dst, nil
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
		case "sum_prefill_tokens":
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
