package sim

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/httpconn"
)

// roomHandover is a sequence's part of a hand-over by room.
type roomHandover struct {
	room int64
	host string
	port int
	ctx  context.Context // ends with the job, or when the transfer has ended
	stop context.CancelFunc
	rank int    // decode: the rank of the prefill, once known
	side string // decode: the address of the prefill rank, once known
}

// room is where a prefill's request and a decode's handshake meet, in either order. It
// belongs to the rank's goroutine, except done, which is closed at the end, and the
// result, which is written before that.
type room struct {
	id        int64
	seq       *seq        // the prefill's request, nil until it arrives
	handshake *roomCall   // decode's handshake, nil until it arrives
	timer     *time.Timer // limits the wait for the other side
	done      chan struct{}
	result    roomReply
}

// roomCall is decode's handshake on the prefill rank's side channel, which stands for
// SGLang's ZMQ messages between the ranks. Tokens and Sum are of decode's own prompt:
// KV of another prompt is an error here, whereas a real engine reads wrong KV.
type roomCall struct {
	Room   int64  `json:"room"`
	Rank   int    `json:"dp_rank"`
	Tokens int    `json:"tokens"`
	Sum    uint64 `json:"sum"`
}

type roomReply struct {
	Done   bool   `json:"done"`
	Error  string `json:"error,omitempty"`
	Cached int    `json:"cached"`
}

const (
	maxRooms     = 1 << 16 // open rooms of a rank
	maxUsedRooms = 1 << 16
)

// rooms are the rooms of one rank: the open ones, and the numbers of ended ones, which
// no request can use again.
type rooms struct {
	open  map[int64]*room
	used  map[int64]roomReply // how it ended; not Done if no decode was told
	order []int64
}

func (rs *rooms) init() { rs.open, rs.used = make(map[int64]*room), make(map[int64]roomReply) }

// waiting counts the open rooms that have a prefill's request.
func (rs *rooms) waiting() (n int) {
	for _, x := range rs.open {
		if x.seq != nil {
			n++
		}
	}
	return n
}

// stop stops the timers of the rooms of an incarnation.
func (rs *rooms) stop() {
	for _, x := range rs.open {
		x.timer.Stop()
	}
}

// markUsed marks the number id as used.
func (rs *rooms) markUsed(id int64, how roomReply) {
	if _, ok := rs.used[id]; ok {
		return
	}
	if len(rs.order) == maxUsedRooms {
		delete(rs.used, rs.order[0])
		rs.order = rs.order[1:]
	}
	rs.used[id] = how
	rs.order = append(rs.order, id)
}

func promptSum(ids []uint32) uint64 {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return xxh3.Hash(b)
}

// openRoom returns the open room of that number and creates it if needed. It returns
// nil and the reason if that is impossible.
func (r *rank) openRoom(id int64) (*room, string) {
	if x := r.rooms.open[id]; x != nil {
		return x, ""
	}
	if _, ok := r.rooms.used[id]; ok {
		r.counters.roomsReused++
		return nil, "Room was used before"
	}
	if len(r.rooms.open) >= maxRooms {
		return nil, "Too many rooms are open"
	}
	x := &room{id: id, done: make(chan struct{})}
	x.timer = time.AfterFunc(r.o.BootstrapTimeout, func() {
		r.post(func() {
			if x.seq == nil || x.handshake == nil {
				r.counters.roomsTimedOut++
				r.closeRoom(x, fmt.Sprintf("Request timed out after %.1fs in KVPoll.Bootstrapping", r.o.BootstrapTimeout.Seconds()))
			}
		})
	})
	r.rooms.open[id] = x
	return x, ""
}

// closeRoom ends a room; reason "" is success. With a reason, a prefill's request in
// the room that has not been served fails.
func (r *rank) closeRoom(x *room, reason string) {
	if r.rooms.open[x.id] != x {
		return
	}
	x.timer.Stop()
	delete(r.rooms.open, x.id)
	x.result.Done, x.result.Error = true, reason
	r.rooms.markUsed(x.id, x.result)
	close(x.done)
	if reason != "" {
		r.counters.roomsFailed++
		if x.seq != nil {
			r.failRoom(x.seq, reason)
		}
	}
}

// failRoom fails a sequence's job as SGLang does after a failed transfer.
func (r *rank) failRoom(s *seq, reason string) {
	if s.j.ended {
		return
	}
	s.j.Aborted = fmt.Sprintf("%s transfer failed for request rank=%d req.rid=%q with exception KVTransferError(bootstrap_room=%d): %s",
		map[bool]string{true: "Prefill", false: "Decode"}[s.Limit == 1], r.index, s.j.ID, s.handover.room, reason)
	r.fail(s.j, 500, s.j.Aborted)
}

// submit makes a prefill wait for its decode's handshake, and a decode find its
// prefill.
func (g *sglangLeg) submit(r *rank, j *job) {
	for _, s := range j.seqs {
		s.handover.ctx, s.handover.stop = context.WithCancel(r.l.ctx)
	}
	for _, s := range j.seqs {
		if j.ended {
			return
		}
		if !g.prefill {
			g.findPrefill(r, s)
			continue
		}
		if !g.follow {
			r.l.bootstrap.SetRank(s.handover.room, r.index)
		}
		x, why := r.openRoom(s.handover.room)
		if x != nil && x.seq != nil {
			r.counters.roomsReused++
			x, why = nil, "Room is in use"
		}
		if x == nil {
			r.failRoom(s, why)
			return
		}
		x.seq = s
		r.transfer(s) // it waits and has no blocks yet
		r.roomReady(x)
	}
}

// roomReady lets the prefill compute once both sides are there.
func (r *rank) roomReady(x *room) {
	if x.seq == nil || x.handshake == nil {
		return
	}
	x.timer.Stop()
	s := x.seq
	if x.handshake.Tokens != len(s.Prompt) || x.handshake.Sum != promptSum(s.Prompt) {
		r.counters.roomsMismatched++
		r.closeRoom(x, fmt.Sprintf("decode has a prompt of %d tokens, prefill another of %d", x.handshake.Tokens, len(s.Prompt)))
		return
	}
	r.endTransfer(s)
	r.waiting = append(r.waiting, s)
}

// holdLastToken delays the response of a prefill until decode has the KV.
func (g *sglangLeg) holdLastToken(r *rank, s *seq) bool {
	x := r.rooms.open[s.handover.room]
	if !g.prefill || x == nil || x.seq != s {
		return false
	}
	f := r.e.matchFault(s.j.req, "handover", false)
	s.pulling = true // the blocks belong to the transfer
	r.e.blockLog.acquire(s.j.blockLogID)
	r.l.wg.Go(func() {
		defer s.handover.stop()
		ok := faultTransfer(s.handover.ctx, f) && sleepContext(s.handover.ctx, cost.Scale(r.o.Cost.TransferTime(len(s.Prompt)), r.o.Speed))
		r.post(func() {
			s.pulling = false
			if s.j.ended {
				r.pool.Release(s.blocks)
				s.blocks = nil
			}
			r.e.blockLog.release(s.j.blockLogID)
			switch {
			case !ok:
				r.counters.pullsFailed++
				r.closeRoom(x, "Failed to send kv chunk")
			default:
				x.result.Cached = s.Cached
				r.closeRoom(x, "")
				r.finishHeld(s)
			}
		})
	})
	return true
}

// cancel ends the wait in the room. Neither side is told that the other has ended: they
// notice by timeout.
func (g *sglangLeg) cancel(r *rank, j *job) {
	for _, s := range j.seqs {
		if s.handover.stop != nil {
			s.handover.stop()
		}
		if !g.prefill {
			continue // its wait ends with its context
		}
		if s.pulling && !s.lastHeld { // it waited in the room, without blocks
			r.endTransfer(s)
		}
		if x := r.rooms.open[s.handover.room]; x != nil && x.seq == s {
			x.timer.Stop()
			delete(r.rooms.open, x.id)
			r.rooms.markUsed(x.id, roomReply{})
		}
	}
}

// serveSideRooms serves decode on a prefill rank's side channel. /room/open reports
// that decode has its blocks ready; /room/wait returns the result or, after a limited
// time, none.
func serveSideRooms(c *conn, r *httpconn.Request) {
	var q roomCall
	if err := json.Unmarshal(r.Body, &q); err != nil || q.Rank < 0 || q.Rank >= len(c.incarnation.ranks) {
		c.Respond(r, 400, "text/plain", []byte("want a room and a rank"))
		return
	}
	rk := c.incarnation.ranks[q.Rank]
	var x *room
	reply := roomReply{Done: true}
	rk.do(func() {
		if r.Path == "/room/wait" {
			if x = rk.rooms.open[q.Room]; x == nil {
				reply = rk.rooms.used[q.Room]
			}
			return
		}
		if how, ok := rk.rooms.used[q.Room]; ok && !how.Done {
			reply.Done = false // its prefill has ended, which no decode is told
			return
		}
		var why string
		if x, why = rk.openRoom(q.Room); x == nil {
			reply.Error = why
			return
		}
		if x.handshake != nil {
			rk.counters.roomsReused++
			x, reply.Error = nil, "Room is in use"
			return
		}
		x.handshake = &q
		rk.roomReady(x)
	})
	if x != nil || !reply.Done {
		var done chan struct{} // nil: no result will come
		if x != nil {
			done = x.done
		}
		reply.Done = false
		t := time.NewTimer(roomWait)
		select {
		case <-done:
			reply = x.result
		case <-t.C:
		case <-c.incarnation.stopc:
		}
		t.Stop()
	}
	body, _ := json.Marshal(reply)
	c.Respond(r, 200, "application/json", body)
}

const roomWait = time.Second // how long one /room call is kept open
