package sim

import (
	"encoding/binary"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"
)

// loadTick is how often a rank's load is looked at and told when it has changed, and
// loadRepeat how often when it has not. SGLang looks at every fifth step of its
// scheduler, and repeats what has not changed once a second.
const (
	loadTick   = 50 * time.Millisecond
	loadRepeat = time.Second
)

// pack is the message of SGLang's load socket (0.5.23, load_publisher.py): the name
// LoadStat and, in this order, all that it has to say.
func (s *loadSnapshot) pack() []byte {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 11), "LoadStat")
	for _, n := range [...]int{s.Running, s.Waiting, s.Used, s.MaxTotal, s.DPRank, s.Uncached, s.Total, s.MaxRunning, 0, 0} {
		b = msgp.AppendInt(b, n)
	}
	return b
}

// publishLoads publishes the rank's load until the life ends: ["load"][seq][stat]. It
// is a goroutine beside the publisher, which the scheduler may wait for and which
// therefore must not wait for the scheduler.
func (r *rank) publishLoads(s *zmq.Socket) {
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
		now := r.loadSnapshot()
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
