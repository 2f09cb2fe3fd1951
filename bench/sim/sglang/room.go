package sglang

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
)

// handover is a sequence's part of a hand-over by room.
type handover struct {
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
	seq       *core.Seq   // the prefill's request, nil until it arrives
	leg       *leg        // of seq
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
	rank  *core.Rank
	open  map[int64]*room
	used  map[int64]roomReply // how it ended; not Done if no decode was notified
	order []int64
}

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

// openRoom returns the open room of that number and creates it if needed. It returns
// nil and the reason if that is impossible.
func (rs *rooms) openRoom(id int64) (*room, string) {
	if x := rs.open[id]; x != nil {
		return x, ""
	}
	r := rs.rank
	if _, ok := rs.used[id]; ok {
		r.Counters.RoomsReused++
		return nil, "Room was used before"
	}
	if len(rs.open) >= maxRooms {
		return nil, "Too many rooms are open"
	}
	x, timeout := &room{id: id, done: make(chan struct{})}, r.Process.Options.BootstrapTimeout
	x.timer = time.AfterFunc(timeout, func() {
		r.Post(func() {
			if x.seq == nil || x.handshake == nil {
				r.Counters.RoomsTimedOut++
				rs.closeRoom(x, fmt.Sprintf("Request timed out after %.1fs in KVPoll.Bootstrapping", timeout.Seconds()))
			}
		})
	})
	rs.open[id] = x
	return x, ""
}

// closeRoom ends a room; reason "" is success. With a reason, a prefill's request in
// the room that has not been served fails.
func (rs *rooms) closeRoom(x *room, reason string) {
	if rs.open[x.id] != x {
		return
	}
	x.timer.Stop()
	delete(rs.open, x.id)
	x.result.Done, x.result.Error = true, reason
	rs.markUsed(x.id, x.result)
	close(x.done)
	if reason != "" {
		rs.rank.Counters.RoomsFailed++
		if x.seq != nil {
			x.leg.fail(rs.rank, x.seq, reason)
		}
	}
}

// ready lets the prefill compute once both sides are there.
func (rs *rooms) ready(x *room) {
	if x.seq == nil || x.handshake == nil {
		return
	}
	x.timer.Stop()
	s := x.seq
	if x.handshake.Tokens != len(s.Prompt) || x.handshake.Sum != core.PromptSum(s.Prompt) {
		rs.rank.Counters.RoomsMismatched++
		rs.closeRoom(x, fmt.Sprintf("decode has a prompt of %d tokens, prefill another of %d", x.handshake.Tokens, len(s.Prompt)))
		return
	}
	rs.rank.EndTransfer(s)
	rs.rank.Queue(s)
}

// leave removes a prefill's request from its room. Its decode is not notified.
func (rs *rooms) leave(id int64, s *core.Seq) {
	if x := rs.open[id]; x != nil && x.seq == s {
		x.timer.Stop()
		delete(rs.open, x.id)
		rs.markUsed(x.id, roomReply{})
	}
}

// fail fails a sequence's job as SGLang does after a failed transfer.
func (g *leg) fail(r *core.Rank, s *core.Seq, reason string) {
	if s.Job.Ended() {
		return
	}
	s.Job.Aborted = fmt.Sprintf("%s transfer failed for request rank=%d req.rid=%q with exception KVTransferError(bootstrap_room=%d): %s",
		map[bool]string{true: "Prefill", false: "Decode"}[s.Limit == 1], r.Index, s.Job.ID, g.handovers[s].room, reason)
	r.Fail(s.Job, 500, s.Job.Aborted)
}

// Submit makes a prefill wait for its decode's handshake, and a decode find its
// prefill.
func (g *leg) Submit(r *core.Rank, j *core.Job) {
	for _, m := range g.handovers {
		m.ctx, m.stop = context.WithCancel(r.Process.Context)
	}
	rs := g.family.roomsOf(r)
	for _, s := range j.Seqs {
		if j.Ended() {
			return
		}
		if !g.prefill {
			g.findPrefill(r, s)
			continue
		}
		id := g.handovers[s].room
		if !g.follow {
			g.family.bootstrap.SetRank(id, r.Index)
		}
		x, why := rs.openRoom(id)
		if x != nil && x.seq != nil {
			r.Counters.RoomsReused++
			x, why = nil, "Room is in use"
		}
		if x == nil {
			g.fail(r, s, why)
			return
		}
		x.seq, x.leg = s, g
		r.Transfer(s) // it waits and has no blocks yet
		rs.ready(x)
	}
}

// HoldLastToken delays the response of a prefill until decode has the KV.
func (g *leg) HoldLastToken(r *core.Rank, s *core.Seq) bool {
	m, rs := g.handovers[s], g.family.roomsOf(r)
	x := rs.open[m.room]
	if !g.prefill || x == nil || x.seq != s {
		return false
	}
	f := r.Process.HandoverFault(s.Job)
	r.HoldBlocks(s)
	r.Process.Go(func() {
		defer m.stop()
		ok := core.FaultTransfer(m.ctx, f) && core.Sleep(m.ctx, r.Process.TransferTime(len(s.Prompt)))
		r.Post(func() {
			r.UnholdBlocks(s)
			switch {
			case !ok:
				r.Counters.PullsFailed++
				rs.closeRoom(x, "Failed to send kv chunk")
			default:
				x.result.Cached = s.Cached
				rs.closeRoom(x, "")
				r.FinishHeld(s)
			}
		})
	})
	return true
}

// Cancel ends the wait in the room. Neither side is notified that the other has ended: they
// notice by timeout.
func (g *leg) Cancel(r *core.Rank, j *core.Job) {
	for _, s := range j.Seqs {
		m := g.handovers[s]
		if m.stop != nil {
			m.stop()
		}
		if !g.prefill {
			continue // its wait ends with its context
		}
		if s.Transferring() && !s.LastHeld() { // it waited in the room, without blocks
			r.EndTransfer(s)
		}
		g.family.roomsOf(r).leave(m.room, s)
	}
}

// ServeSide serves decode on a prefill rank's side channel. /room/open reports
// that decode has its blocks ready; /room/wait returns the result or, after a limited
// time, none.
func (f *family) ServeSide(c *httpconn.Conn, r *httpconn.Request) {
	var q roomCall
	if err := json.Unmarshal(r.Body, &q); err != nil || q.Rank < 0 || q.Rank >= len(f.rooms) || r.Path != "/room/open" && r.Path != "/room/wait" {
		c.Respond(r, 400, "text/plain", []byte("want a room and a rank"))
		return
	}
	rs := &f.rooms[q.Rank]
	var x *room
	reply := roomReply{Done: true}
	rs.rank.Do(func() {
		if r.Path == "/room/wait" {
			if x = rs.open[q.Room]; x == nil {
				reply = rs.used[q.Room]
			}
			return
		}
		if how, ok := rs.used[q.Room]; ok && !how.Done {
			reply.Done = false // its prefill has ended, of which no decode is notified
			return
		}
		var why string
		if x, why = rs.openRoom(q.Room); x == nil {
			reply.Error = why
			return
		}
		if x.handshake != nil {
			rs.rank.Counters.RoomsReused++
			x, reply.Error = nil, "Room is in use"
			return
		}
		x.handshake = &q
		rs.ready(x)
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
		case <-f.p.Context.Done():
		}
		t.Stop()
	}
	body, _ := json.Marshal(reply)
	c.Respond(r, 200, "application/json", body)
}

const roomWait = time.Second // how long one /room call is kept open
