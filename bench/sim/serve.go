package sim

import (
	"strconv"
	"strings"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/nixl"
)

// serveAPI serves one request of a client port, at once or through the job it returns.
func serveAPI(c *conn, r *httpconn.Request) *core.Job {
	l := c.incarnation
	if l.isStopping() {
		c.Respond(r, 500, "application/json", l.e.errorBody(500, core.DeadMessage, ""))
		return nil
	}
	formatOf, generates := l.e.surface.inference[r.Path]
	if !l.e.o.VLLM.HasEndpoint(r.Path) {
		l.e.log.add(r, -1)
		c.Respond(r, 404, "application/json", []byte(`{"detail":"Not Found"}`))
		return nil
	}
	if !generates || r.Method != "POST" {
		l.e.log.add(r, -1)
		if f := l.e.matchFault(r, "whole", r.Path == "/v1/embeddings"); f != nil && c.faultBeforeHead(r, f, nil) {
			return nil
		}
		if generates {
			c.Respond(r, 405, "application/json", []byte(`{"detail":"Method Not Allowed"}`))
			return nil
		}
		serveAux(c, r)
		return nil
	}
	j := core.NewJob(c.Conn, r)
	j.Response = api.Response{Config: l.e.formats, Members: j, Send: c.Send, Created: time.Now().Unix()}
	j.Format = formatOf(&j.Response)
	b, err := l.e.surface.read(r.Path, r.Body)
	var leg core.Leg
	if err == nil {
		leg, err = l.family.Read(b, r)
	}
	if r.Path == "/v1/messages" && err == nil && l.e.o.VLLM.ChecksBudget() {
		if err = b.CheckBudget(); err != nil {
			leg = nil // the body is validated before the handle is used
		}
	}
	side := "whole"
	if leg != nil {
		side = leg.Side()
	}
	rank, rerr := l.chooseRank(c, r, leg)
	if err == nil {
		err = rerr
	}
	l.e.log.add(r, rank)
	f := l.e.matchFault(r, side, true)
	if f != nil && c.faultBeforeHead(r, f, j.Format) {
		if f.Kind == faults.Status {
			refused(leg)
		}
		return nil
	}
	if f != nil && f.Kind == faults.Stall && f.Phase == "" && f.After == 0 {
		f = nil // the fault is over; the rank does not see it
	}
	if err == nil {
		err = l.build(j, b, leg, r)
	}
	if err == nil {
		j.Rank, j.Response.Rank = l.Ranks[rank], rank
		if int(j.Rank.Load.Load()) >= l.e.o.MaxQueue+l.e.o.MaxSeqs {
			err = api.Refuse(503, "", "The engine's request queue is full.")
		}
	}
	if err != nil {
		l.rejected.Add(1)
		refused(leg)
		ref := api.AsRefusal(err)
		body := j.Format.ErrorBody(ref.Status, ref.Msg)
		if ref.Param != "" && r.Path != "/generate" && r.Path != "/v1/messages" {
			body = l.e.errorBody(ref.Status, ref.Msg, ref.Param)
		}
		c.Respond(r, ref.Status, "application/json", body)
		return nil
	}
	j.Fault = f
	// A client that disconnects before the engine schedules its request leaves no
	// trace. As in vLLM, prefill then keeps the blocks of such a decode until the lease
	// expires.
	if l.e.surface.headFirst && !j.Begin() || c.WaitOrGone(cost.Scale(l.e.o.Cost.Admit, l.e.o.Speed)) || !l.e.surface.headFirst && !j.Begin() {
		l.abortedEarly.Add(1)
		return nil
	}
	j.Rank.Load.Add(1)
	if !j.Rank.Post(func() { j.Rank.Submit(j) }) {
		j.Rank.Load.Add(-1)
		if !j.HeadSent() {
			c.Respond(r, 500, "application/json", j.Format.ErrorBody(500, core.DeadMessage))
		}
		return nil
	}
	return j
}

// faultBeforeHead applies a fault that occurs before the head. It returns true if that
// ended the request. The rank applies all other faults.
func (c *conn) faultBeforeHead(r *httpconn.Request, f *faults.Fault, fm api.Format) bool {
	failure := func(status int, msg string) []byte { return c.incarnation.e.errorBody(status, msg, "") }
	if fm != nil {
		failure = fm.ErrorBody
	}
	switch {
	case f.Kind == faults.Status:
		status := f.Status
		if status == 0 {
			status = 503
		}
		c.Respond(r, status, "application/json", failure(status, "injected fault"))
		return true
	case f.Phase != "" && fm != nil:
		return false // after the head is sent
	case f.Kind == faults.Malformed && f.After == 0:
		c.Respond(r, 200, "application/json", []byte(core.MalformedBody))
		return true
	case f.Kind == faults.Stall && f.After == 0:
		d := f.Delay
		if d <= 0 {
			d = 1000 * time.Hour
		}
		return c.WaitOrGoneUntil(d, f.Until)
	case f.Kind == faults.Slow && fm == nil:
		return c.WaitOrGone(f.Delay)
	case f.Kind == faults.Reset && f.After == 0:
		c.Reset()
		return true
	case f.Kind == faults.Truncate && fm == nil:
		r.Close = true
		c.Send([]byte("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"))
		c.CloseWrite()
		return true
	case f.Kind == faults.Crash && f.After == 0:
		c.Respond(r, 500, "application/json", failure(500, core.DeadMessage))
		go c.incarnation.e.crash(c.incarnation, false)
		return true
	}
	return false
}

// matchFault returns the fault that occurs to a request, see faults.Set.Match.
func (e *Engine) matchFault(r *httpconn.Request, leg string, generates bool) *faults.Fault {
	return e.faults.Match(faults.Request{Path: r.Path, ID: header(r, "X-Request-Id"), Body: r.Body}, leg, generates)
}

// refused tells a leg that its request was refused before the engine scheduled it.
func refused(leg core.Leg) {
	if leg != nil {
		leg.OnRefused()
	}
}

// chooseRank returns the rank of the port or the header, or else the least loaded.
func (l *incarnation) chooseRank(c *conn, r *httpconn.Request, leg core.Leg) (int, error) {
	n := len(l.Ranks)
	if c.rank >= 0 {
		return c.rank, nil
	}
	if leg != nil {
		if k := leg.Rank(n); k >= 0 {
			if k >= n {
				return -1, api.Refuse(400, "", "data_parallel_rank %d is out of range [0, %d).", k, n)
			}
			return k, nil
		}
	}
	want, named := 0, false
	if v, ok := r.Get("X-data-parallel-rank"); ok && l.e.o.VLLM.RankHeader() {
		if i, err := strconv.Atoi(strings.TrimSpace(v)); err == nil { // vLLM ignores a value that is not an integer
			want, named = i, true
		}
	}
	if named {
		if want < 0 || want >= n {
			return -1, api.Refuse(400, "", "data_parallel_rank %d is out of range [0, %d).", want, n)
		}
		return want, nil
	}
	best := int(l.next.Add(1)) % n
	for i := range n {
		k := (best + i) % n
		if l.Ranks[k].Load.Load() < l.Ranks[best].Load.Load() {
			best = k
		}
	}
	return best, nil
}

// build validates a request and fills its job.
func (l *incarnation) build(j *core.Job, b *api.Body, leg core.Leg, r *httpconn.Request) error {
	if media, _, _ := strings.Cut(header(r, "Content-Type"), ";"); !strings.EqualFold(strings.TrimSpace(media), "application/json") {
		return api.Refuse(400, "", "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
	}
	ids, err := j.ReadParams(b, r.Path, header(r, "X-Session-ID"))
	if err != nil {
		return err
	}
	if list, err := nixl.PromptIDs(b, r.Path, &l.e.o); err != nil {
		return err
	} else if list != nil {
		ids = [][]uint32{list}
	}
	l.name(j, r, b)
	for _, list := range ids {
		for range j.Params.N {
			j.AddSeq(b, list)
		}
	}
	if leg != nil {
		j.Leg = leg
		return leg.Begin(j)
	}
	return nil
}

// name sets the ids of the job: X-Request-Id, or the body's id, or a random one.
func (l *incarnation) name(j *core.Job, r *httpconn.Request, b *api.Body) {
	id := header(r, "X-Request-Id")
	if id == "" {
		if id = b.RequestID; id == "" {
			id = randomHex(8)
		}
	}
	j.ID = j.Format.Prefix() + id
	if l.e.o.Engine == "sglang" {
		j.RIDs, _, _ = api.OneOrMany[string](b.RID, "rid", "a string")
		if j.ID = randomHex(16); len(j.RIDs) > 0 {
			j.ID = j.RIDs[0]
		}
	}
	j.BlockLogID = header(r, "X-Request-Id")
	j.Internal = j.ID
	if r.Path == "/v1/completions" {
		j.Internal += "-0"
	}
	if o := &l.e.o; o.VLLM.IDSuffix() && !o.ClientIDs {
		j.Internal += "-" + randomHex(4)
	}
}

func header(r *httpconn.Request, name string) string {
	v, _ := r.Get(name)
	return v
}
