package sim

import (
	"errors"
	"strconv"
	"strings"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
)

// serveAPI serves one request of a client port, at once or through the job it returns.
func serveAPI(c *conn, r *httpconn.Request) *job {
	l := c.incarnation
	if l.isStopping() {
		c.Respond(r, 500, "application/json", l.e.errorBody(500, deadMessage, ""))
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
		if f := l.e.matchFault(r, "plain", r.Path == "/v1/embeddings"); f != nil && c.faultBeforeHead(r, f, nil) {
			return nil
		}
		if generates {
			c.Respond(r, 405, "application/json", []byte(`{"detail":"Method Not Allowed"}`))
			return nil
		}
		serveAux(c, r)
		return nil
	}
	j := &job{c: c, req: r, done: make(chan struct{})}
	j.Response = api.Response{Config: l.e.formats, Members: j, Send: c.Send, Created: time.Now().Unix()}
	j.Format = formatOf(&j.Response)
	b, err := l.e.surface.read(r.Path, r.Body)
	var h *handle
	var pd pdLeg
	if read := pdFamilies[l.e.o.PD]; err == nil && read != nil {
		pd, err = read(l, b, r)
	} else if err == nil {
		h, err = readTransferParams(b.KVTransfer)
		if err != nil && !isRefusal(err) {
			err = api.Refuse(400, "body.kv_transfer_params", "%s", err)
		}
		if l.e.o.PD == "none" {
			h = nil // vLLM without a connector logs a warning and ignores it
		}
	}
	if r.Path == "/v1/messages" && err == nil && l.e.o.VLLM.ChecksBudget() {
		if err = b.CheckBudget(); err != nil {
			h, pd = nil, nil // the body is validated before the handle is used
		}
	}
	leg := "plain"
	switch {
	case pd != nil:
		leg = pd.side()
	case h != nil && h.wire.RemotePrefill:
		leg = "decode"
	case h != nil && h.wire.RemoteDecode:
		leg = "prefill"
	}
	rank, rerr := l.chooseRank(c, r, pd)
	if err == nil {
		err = rerr
	}
	l.e.log.add(r, rank)
	f := l.e.matchFault(r, leg, true)
	if f != nil && c.faultBeforeHead(r, f, j.Format) {
		if f.Kind == faults.Status {
			l.releaseRefused(h, pd)
		}
		return nil
	}
	if f != nil && f.Kind == faults.Stall && f.Phase == "" && f.After == 0 {
		f = nil // the fault is over; the rank does not see it
	}
	if err == nil && h != nil && !l.e.o.VLLM.RemoteID() && h.wire.RequestID == "" {
		h.wire.RequestID = "-" // decode refers to the request by its own id, which name sets
	}
	if err == nil {
		err = l.build(j, b, h, pd, r)
	}
	if err == nil {
		j.rank, j.Response.Rank = l.ranks[rank], rank
		if int(j.rank.load.Load()) >= l.e.o.MaxQueue+l.e.o.MaxSeqs {
			err = api.Refuse(503, "", "The engine's request queue is full.")
		}
	}
	if err != nil {
		l.rejected.Add(1)
		l.releaseRefused(h, pd)
		ref := api.AsRefusal(err)
		body := j.Format.ErrorBody(ref.Status, ref.Msg)
		if ref.Param != "" && r.Path != "/generate" && r.Path != "/v1/messages" {
			body = l.e.errorBody(ref.Status, ref.Msg, ref.Param)
		}
		c.Respond(r, ref.Status, "application/json", body)
		return nil
	}
	j.fault = f
	// A client that disconnects before the engine schedules its request leaves no
	// trace. As in vLLM, prefill then keeps the blocks of such a decode until the lease
	// expires.
	if l.e.surface.headFirst && !j.begin() || c.WaitOrGone(cost.Scale(l.e.o.Cost.Admit, l.e.o.Speed)) || !l.e.surface.headFirst && !j.begin() {
		l.abortedEarly.Add(1)
		return nil
	}
	j.rank.load.Add(1)
	if !j.rank.post(func() { j.rank.submit(j) }) {
		j.rank.load.Add(-1)
		if !j.headSent {
			c.Respond(r, 500, "application/json", j.Format.ErrorBody(500, deadMessage))
		}
		return nil
	}
	return j
}

// begin sends the head of a stream; it returns false if the client has disconnected.
func (j *job) begin() bool {
	j.headSent = j.Params.Stream
	return !j.headSent || j.c.Send(httpconn.StreamHead(j.req.Close)) == nil
}

func isRefusal(err error) bool {
	var r *api.Refusal
	return errors.As(err, &r)
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
	case f.Kind == faults.Garbage && f.After == 0:
		c.Respond(r, 200, "application/json", []byte(garbageBody))
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
	case f.Kind == faults.Cut && fm == nil:
		r.Close = true
		c.Send([]byte("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"))
		c.CloseWrite()
		return true
	case f.Kind == faults.Dead && f.After == 0:
		c.Respond(r, 500, "application/json", failure(500, deadMessage))
		go c.incarnation.e.crash(c.incarnation, false)
		return true
	}
	return false
}

const garbageBody = `{"id": "garbage", "choices": [{{{`

// matchFault returns the fault that occurs to a request, see faults.Set.Match.
func (e *Engine) matchFault(r *httpconn.Request, leg string, generates bool) *faults.Fault {
	return e.faults.Match(faults.Request{Path: r.Path, ID: header(r, "X-Request-Id"), Body: r.Body}, leg, generates)
}

// releaseRefused releases the blocks at prefill when decode gets an error before the
// engine schedules it, if the release does so.
func (l *incarnation) releaseRefused(h *handle, pd pdLeg) {
	if pd != nil {
		pd.onRefused(l)
	}
	if h != nil && h.wire.RemotePrefill && h.usable() && !h.incomplete() && l.e.o.VLLM.RefusalReleases() {
		l.pull.release(h)
	}
}

// chooseRank returns the rank of the port or the header, or else the least loaded.
func (l *incarnation) chooseRank(c *conn, r *httpconn.Request, pd pdLeg) (int, error) {
	n := len(l.ranks)
	if c.rank >= 0 {
		return c.rank, nil
	}
	if pd != nil {
		if k := pd.rank(n); k >= 0 {
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
		if l.ranks[k].load.Load() < l.ranks[best].load.Load() {
			best = k
		}
	}
	return best, nil
}

// build validates a request and fills its job.
func (l *incarnation) build(j *job, b *api.Body, h *handle, pd pdLeg, r *httpconn.Request) error {
	o := &l.e.o
	if media, _, _ := strings.Cut(header(r, "Content-Type"), ";"); !strings.EqualFold(strings.TrimSpace(media), "application/json") {
		return api.Refuse(400, "", "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
	}
	ids, err := j.ReadParams(b, r.Path, header(r, "X-Session-ID"))
	if err != nil {
		return err
	}
	if h != nil {
		j.prefillLeg = h.wire.RemoteDecode && !h.wire.RemotePrefill
		if h.wire.RemotePrefill {
			j.handle = h
		}
		if list, ok := api.ParseIDs(h.wire.PromptIDs); ok && o.VLLM.AcceptsPromptIDs() && r.Path == "/v1/chat/completions" {
			if len(list) == 0 || len(list) >= o.MaxModelLen {
				return api.Refuse(400, "kv_transfer_params", "kv_transfer_params.prompt_token_ids has %d ids; want 1 to %d.", len(list), o.MaxModelLen-1)
			}
			ids = [][]uint32{list}
		}
	}
	j.name(r, b)
	for _, list := range ids {
		for range j.Params.N {
			s := &seq{j: j}
			j.AddChoice(&s.Choice, b, list)
			j.seqs = append(j.seqs, s)
		}
	}
	if pd != nil {
		j.pd = pd
		return pd.begin(j)
	}
	return nil
}

// name sets the ids of the job: X-Request-Id, or the body's id, or a random one.
func (j *job) name(r *httpconn.Request, b *api.Body) {
	id := header(r, "X-Request-Id")
	if id == "" {
		if id = b.RequestID; id == "" {
			id = randomHex(8)
		}
	}
	j.ID = j.Format.Prefix() + id
	if l := j.c.incarnation; l.e.o.Engine == "sglang" {
		j.RIDs, _, _ = api.OneOrMany[string](b.RID, "rid", "a string")
		if j.ID = randomHex(16); len(j.RIDs) > 0 {
			j.ID = j.RIDs[0]
		}
	}
	j.blockLogID = header(r, "X-Request-Id")
	j.internal = j.ID
	if r.Path == "/v1/completions" {
		j.internal += "-0"
	}
	if o := &j.c.incarnation.e.o; o.VLLM.IDSuffix() && !o.ClientIDs {
		j.internal += "-" + randomHex(4)
	}
	if h := j.handle; h != nil && !j.c.incarnation.e.o.VLLM.RemoteID() {
		h.wire.RequestID = j.internal // decode asks by its own id
	}
}

func header(r *httpconn.Request, name string) string {
	v, _ := r.Get(name)
	return v
}
