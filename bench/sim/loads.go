package sim

import (
	"encoding/binary"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"sluice/bench/sim/core"
)

// loadTick is how often a rank's load is compared and published if it has changed, and
// loadRepeat how often it is published otherwise. SGLang compares at every fifth step
// of its scheduler, and repeats an unchanged load once a second.
const (
	loadTick   = 50 * time.Millisecond
	loadRepeat = time.Second
)

// pack appends the message of SGLang's load socket (0.5.23, load_publisher.py): the
// name LoadStat and its fields in this order.
func (s *loadSnapshot) pack() []byte {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 11), "LoadStat")
	for _, n := range [...]int{s.Running, s.Waiting, s.Used, s.MaxTotal, s.DPRank, s.Uncached, s.Total, s.MaxRunning, 0, 0} {
		b = msgp.AppendInt(b, n)
	}
	return b
}

// publishLoads publishes the rank's load until the incarnation ends:
// ["load"][seq][stat]. It has its own goroutine: the scheduler may wait for the
// publisher, which therefore must not wait for the scheduler.
func (l *incarnation) publishLoads(r *core.Rank, s *zmq.Socket) {
	defer s.Close()
	t := time.NewTicker(loadTick)
	defer t.Stop()
	var last loadSnapshot
	var at time.Time
	for seq := uint64(0); ; {
		select {
		case <-t.C:
		case <-l.stopc:
			return
		}
		now := snapshotLoad(r)
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
