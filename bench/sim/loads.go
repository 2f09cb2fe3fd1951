package sim

import (
	"encoding/binary"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"
)

// loadTick is how often a rank's load is published, when it has changed, and
// loadRepeat when it has not. SGLang's own rhythm was not read.
const (
	loadTick   = 50 * time.Millisecond
	loadRepeat = time.Second
)

// pack is the msgpack map of SGLang's load socket: members at their default, 0,
// are left out.
func (s *loadSnapshot) pack() []byte {
	type member struct {
		name string
		n    int
		f    float64
	}
	list := []member{{"num_running_reqs", s.Running, 0}, {"num_waiting_reqs", s.Waiting, 0}, {"num_waiting_uncached_tokens", s.Uncached, 0},
		{"num_used_tokens", s.Used, 0}, {"num_total_tokens", s.Total, 0}, {"max_total_num_tokens", s.MaxTotal, 0}, {"max_running_requests", s.MaxRunning, 0},
		{"token_usage", 0, s.Usage}, {"gen_throughput", 0, s.Throughput}, {"cache_hit_rate", 0, s.HitRate}, {"utilization", 0, s.Utilization}}
	n := uint32(2)
	for _, m := range list {
		if m.n != 0 || m.f != 0 {
			n++
		}
	}
	b := msgp.AppendMapHeader(nil, n)
	b = msgp.AppendFloat64(msgp.AppendString(b, "timestamp"), s.Timestamp)
	b = msgp.AppendInt(msgp.AppendString(b, "dp_rank"), s.DPRank)
	for _, m := range list {
		switch {
		case m.n != 0:
			b = msgp.AppendInt(msgp.AppendString(b, m.name), m.n)
		case m.f != 0:
			b = msgp.AppendFloat64(msgp.AppendString(b, m.name), m.f)
		}
	}
	return b
}

// tellLoads publishes the rank's load until the life ends: ["load"][seq][map]. It
// is a goroutine beside the publisher, which the scheduler may wait for and which
// therefore must not wait for the scheduler.
func (r *rank) tellLoads(s *zmq.Socket) {
	defer s.Close()
	t := time.NewTicker(loadTick)
	defer t.Stop()
	var last loadSnapshot
	var at time.Time
	for seq := uint64(0); ; {
		select {
		case <-t.C:
		case <-r.l.stopc:
			return
		}
		now := r.snapshot()
		same := now
		same.Timestamp = last.Timestamp
		if same == last && time.Since(at) < loadRepeat {
			continue
		}
		last, at = now, time.Now()
		s.SendMessageDontwait("load", binary.BigEndian.AppendUint64(nil, seq), now.pack())
		seq++
	}
}
