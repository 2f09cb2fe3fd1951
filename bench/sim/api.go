package sim

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/textgen"
)

const maxSequences = 1 << 14 // per request

func hashString(s string) uint64 { return xxh3.HashString(s) }

// The generating endpoints of vLLM and their formats.
var vllmInference = map[string]func(*job) format{
	"/v1/chat/completions":   newChatFormat,
	"/v1/completions":        newCompletionFormat,
	"/v1/responses":          newResponsesFormat,
	"/v1/messages":           newMessagesFormat,
	"/inference/v1/generate": newGenerateFormat,
}

// format is the response format of one endpoint. Its methods run on the rank's
// goroutine, except errorBody, which any goroutine calls.
type format interface {
	needsText() bool                                            // whether a stream needs the whole text at its end
	first(w *chunker, s *seq)                                   // before a choice's first token
	delta(w *chunker, s *seq, id uint32, text string)           // one token; s.reason is set on the last
	last(w *chunker, j *job)                                    // after all choices, to the end of the body
	full(b []byte, j *job) []byte                               // the non-streaming answer
	streamError(w *chunker, j *job, status int, message string) // an error in the middle of a stream
	errorBody(status int, message string) []byte                // an error instead of a response
}

// serveAPI serves one request of a client port, at once or through the job it returns.
func serveAPI(c *conn, r *httpRequest) *job {
	l := c.incarnation
	if l.isStopping() {
		c.respond(r, 500, "application/json", l.e.errorBody(500, deadMessage, ""))
		return nil
	}
	formatOf, generates := l.e.surface.inference[r.path]
	if !l.e.o.release.HasEndpoint(r.path) {
		l.e.log.add(r, -1)
		c.respond(r, 404, "application/json", []byte(`{"detail":"Not Found"}`))
		return nil
	}
	if !generates || r.method != "POST" {
		l.e.log.add(r, -1)
		if f := l.e.faults.Match(r, "plain", r.path == "/v1/embeddings"); f != nil && c.faultBeforeHead(r, f, nil) {
			return nil
		}
		if generates {
			c.respond(r, 405, "application/json", []byte(`{"detail":"Method Not Allowed"}`))
			return nil
		}
		serveAux(c, r)
		return nil
	}
	j := &job{c: c, req: r, done: make(chan struct{}), created: time.Now().Unix()}
	j.format = formatOf(j)
	b, err := l.e.surface.read(r.path, r.body)
	var h *handle
	var pd pdLeg
	if read := pdFamilies[l.e.o.PD]; err == nil && read != nil {
		pd, err = read(l, b, r)
	} else if err == nil {
		h, err = readTransferParams(b.KVTransfer)
		if err != nil && !isRefusal(err) {
			err = refuse(400, "body.kv_transfer_params", "%s", err)
		}
		if l.e.o.PD == "none" {
			h = nil // vLLM without a connector logs a warning and ignores it
		}
	}
	if r.path == "/v1/messages" && err == nil && l.e.o.release.ChecksBudget() {
		if err = b.checkBudget(); err != nil {
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
	f := l.e.faults.Match(r, leg, true)
	if f != nil && c.faultBeforeHead(r, f, j.format) {
		if f.Kind == faults.Status {
			l.releaseRefused(h, pd)
		}
		return nil
	}
	if f != nil && f.Kind == faults.Stall && f.Phase == "" && f.After == 0 {
		f = nil // the fault is over; the rank does not see it
	}
	if err == nil && h != nil && !l.e.o.release.RemoteID() && h.wire.RequestID == "" {
		h.wire.RequestID = "-" // decode refers to the request by its own id, which name sets
	}
	if err == nil {
		err = l.build(j, b, h, pd, r)
	}
	if err == nil {
		j.rank = l.ranks[rank]
		if int(j.rank.load.Load()) >= l.e.o.MaxQueue+l.e.o.MaxSeqs {
			err = refuse(503, "", "The engine's request queue is full.")
		}
	}
	if err != nil {
		l.rejected.Add(1)
		l.releaseRefused(h, pd)
		ref := &refusal{400, err.Error(), ""}
		errors.As(err, &ref)
		body := j.format.errorBody(ref.status, ref.msg)
		if ref.param != "" && r.path != "/generate" && r.path != "/v1/messages" {
			body = l.e.errorBody(ref.status, ref.msg, ref.param)
		}
		c.respond(r, ref.status, "application/json", body)
		return nil
	}
	j.fault = f
	// A client that disconnects before the engine schedules its request leaves no
	// trace. As in vLLM, prefill then keeps the blocks of such a decode until the lease
	// expires.
	if l.e.surface.headFirst && !j.begin() || c.waitOrGone(cost.Scale(l.e.o.Cost.Admit, l.e.o.Speed)) || !l.e.surface.headFirst && !j.begin() {
		l.abortedEarly.Add(1)
		return nil
	}
	j.rank.load.Add(1)
	if !j.rank.post(func() { j.rank.submit(j) }) {
		j.rank.load.Add(-1)
		if !j.headSent {
			c.respond(r, 500, "application/json", j.format.errorBody(500, deadMessage))
		}
		return nil
	}
	return j
}

// begin sends the head of a stream; it returns false if the client has disconnected.
func (j *job) begin() bool {
	j.headSent = j.params.stream
	return !j.headSent || j.c.send(streamHead(j.req.close)) == nil
}

func isRefusal(err error) bool {
	var r *refusal
	return errors.As(err, &r)
}

// faultBeforeHead applies a fault that occurs before the head. It returns true if that
// ended the request. The rank applies all other faults.
func (c *conn) faultBeforeHead(r *httpRequest, f *faults.Fault, fm format) bool {
	failure := func(status int, msg string) []byte { return c.incarnation.e.errorBody(status, msg, "") }
	if fm != nil {
		failure = fm.errorBody
	}
	switch {
	case f.Kind == faults.Status:
		status := f.Status
		if status == 0 {
			status = 503
		}
		c.respond(r, status, "application/json", failure(status, "injected fault"))
		return true
	case f.Phase != "" && fm != nil:
		return false // after the head is sent
	case f.Kind == faults.Garbage && f.After == 0:
		c.respond(r, 200, "application/json", []byte(garbageBody))
		return true
	case f.Kind == faults.Stall && f.After == 0:
		d := f.Delay
		if d <= 0 {
			d = 1000 * time.Hour
		}
		return c.waitOrGoneUntil(d, f.Until)
	case f.Kind == faults.Slow && fm == nil:
		return c.waitOrGone(f.Delay)
	case f.Kind == faults.Reset && f.After == 0:
		c.reset()
		return true
	case f.Kind == faults.Cut && fm == nil:
		r.close = true
		c.send([]byte("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"))
		c.nc.CloseWrite()
		return true
	case f.Kind == faults.Dead && f.After == 0:
		c.respond(r, 500, "application/json", failure(500, deadMessage))
		go c.incarnation.e.crash(c.incarnation, false)
		return true
	}
	return false
}

const garbageBody = `{"id": "garbage", "choices": [{{{`

// releaseRefused releases the blocks at prefill when decode gets an error before the
// engine schedules it, if the release does so.
func (l *incarnation) releaseRefused(h *handle, pd pdLeg) {
	if pd != nil {
		pd.onRefused(l)
	}
	if h != nil && h.wire.RemotePrefill && h.usable() && !h.incomplete() && l.e.o.release.RefusalReleases() {
		l.pull.release(h)
	}
}

// chooseRank returns the rank of the port or the header, or else the least loaded.
func (l *incarnation) chooseRank(c *conn, r *httpRequest, pd pdLeg) (int, error) {
	n := len(l.ranks)
	if c.rank >= 0 {
		return c.rank, nil
	}
	if pd != nil {
		if k := pd.rank(n); k >= 0 {
			if k >= n {
				return -1, refuse(400, "", "data_parallel_rank %d is out of range [0, %d).", k, n)
			}
			return k, nil
		}
	}
	want, named := 0, false
	if v, ok := r.get("X-data-parallel-rank"); ok && l.e.o.release.RankHeader() {
		if i, err := strconv.Atoi(strings.TrimSpace(v)); err == nil { // vLLM ignores a value that is not an integer
			want, named = i, true
		}
	}
	if named {
		if want < 0 || want >= n {
			return -1, refuse(400, "", "data_parallel_rank %d is out of range [0, %d).", want, n)
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
func (l *incarnation) build(j *job, b *body, h *handle, pd pdLeg, r *httpRequest) error {
	o := &l.e.o
	if media, _, _ := strings.Cut(header(r, "Content-Type"), ";"); !strings.EqualFold(strings.TrimSpace(media), "application/json") {
		return refuse(400, "", "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
	}
	if r.path == "/inference/v1/generate" && o.DisableScaleUp {
		return refuse(403, "", "The scale-out endpoints are disabled; start the engine with --enable-scale-out.")
	}
	if b.Model != "" && b.Model != o.Model {
		return refuse(404, "model", "The model `%s` does not exist.", b.Model)
	}
	j.model = o.Model
	p := &params{stream: b.Stream, n: 1, seed: b.Seed, minTokens: b.MinTokens, ignoreEOS: b.IgnoreEOS,
		includeStop: b.IncludeStop, returnIDs: b.ReturnIDs && o.release.ReturnsIDs(), echo: b.Echo, salt: b.CacheSalt, logprobs: requestedLogprobs(r.path == "/v1/chat/completions", b.Logprobs, b.TopLogprobs), session: header(r, "X-Session-ID")}
	j.params = p
	stop, maxTokens, n := b.Stop, b.MaxTokens, b.N
	if b.MaxCompletion != nil {
		maxTokens = b.MaxCompletion
	}
	ids, err := j.format.(prompter).prompts(j, b)
	if err != nil {
		return err
	}
	switch r.path {
	case "/generate":
		if maxTokens, n, stop, err = b.nativeParams(p); err != nil {
			return err
		}
	case "/v1/responses":
		maxTokens, n = b.MaxOutput, nil
	case "/v1/messages":
		p.stop, n = b.StopSequences, nil
	case "/v1/completions":
		if maxTokens == nil {
			d := 16
			maxTokens = &d
		}
	case "/inference/v1/generate":
		s := b.Sampling
		if s == nil {
			s = &sampling{}
		}
		stop, maxTokens, n = s.Stop, s.MaxTokens, s.N
		p.seed, p.minTokens, p.ignoreEOS, p.includeStop = s.Seed, s.MinTokens, s.IgnoreEOS, s.IncludeStop
		p.logprobs = requestedLogprobs(false, s.Logprobs, 0)
		if maxTokens == nil {
			d := 16
			maxTokens = &d
		}
	}
	if so := b.StreamOptions; so != nil {
		if !p.stream {
			return refuse(400, "stream_options", "Stream options can only be defined when `stream=True`.")
		}
		p.includeUsage, p.everyUsage = so.IncludeUsage, so.IncludeUsage && so.ContinuousUsage
	}
	if p.stop == nil {
		if p.stop, err = stops(stop); err != nil {
			return err
		}
	}
	if n != nil {
		if p.n = *n; p.n < 1 || p.n > 128 {
			return refuse(400, "n", "n must be at least 1 and at most 128, got %d.", p.n)
		}
	}
	if len(ids)*p.n > maxSequences {
		return refuse(400, "prompt", "%d prompts with n=%d are over the limit of %d sequences.", len(ids), p.n, maxSequences)
	}
	longest := 0
	for _, list := range ids {
		longest = max(longest, len(list))
	}
	room := o.MaxModelLen - longest
	if room < 1 {
		return refuse(400, "input_tokens", "This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages.", o.MaxModelLen, longest)
	}
	p.maxTokens = room
	if maxTokens != nil {
		if *maxTokens < 1 {
			return refuse(400, "max_tokens", "max_tokens must be at least 1, got %d.", *maxTokens)
		}
		if *maxTokens > room {
			return refuse(400, "max_tokens", "'max_tokens' or 'max_completion_tokens' is too large: %d. This model's maximum context length is %d tokens and your request has %d input tokens (%d > %d - %d).", *maxTokens, o.MaxModelLen, longest, *maxTokens, o.MaxModelLen, longest)
		}
		p.maxTokens = *maxTokens
	}
	if p.minTokens < 0 || p.minTokens > p.maxTokens {
		return refuse(400, "min_tokens", "min_tokens must be less than or equal to max_tokens=%d, got %d.", p.maxTokens, p.minTokens)
	}
	if h != nil {
		p.prefillLeg = h.wire.RemoteDecode && !h.wire.RemotePrefill
		if h.wire.RemotePrefill {
			p.handle = h
		}
		if list, ok := idList(h.wire.PromptIDs); ok && o.release.AcceptsPromptIDs() && r.path == "/v1/chat/completions" {
			if len(list) == 0 || len(list) >= o.MaxModelLen {
				return refuse(400, "kv_transfer_params", "kv_transfer_params.prompt_token_ids has %d ids; want 1 to %d.", len(list), o.MaxModelLen-1)
			}
			ids = [][]uint32{list}
		}
	}
	j.name(r, b)
	p.toolName, _ = chooseTool(b)
	for _, list := range ids {
		for range p.n {
			s := &seq{j: j, index: len(j.seqs), prompt: list}
			if len(b.native) > 1 {
				s.limit = nativeLimit(&b.native[len(j.seqs)/p.n])
			}
			s.promptLogprobs(b.logprobs, len(j.seqs)/p.n)
			s.gen = textgen.NewGenerator(o.Model, o.Seed, p.seed, s.index%p.n, list)
			if p.toolName != "" {
				s.script = toolScript(b, p.toolName, s.gen.State)
			}
			if text, ok := b.constrainedText(); ok && s.script == nil {
				s.forced = append([]uint32{}, textgen.Vocab().Append(nil, text)...)
			}
			j.seqs = append(j.seqs, s)
		}
	}
	j.unfinished = len(j.seqs)
	if pd != nil {
		p.pd = pd
		return pd.begin(j)
	}
	return nil
}

// prompter is implemented by formats that find the prompt themselves, one list for each
// item.
type prompter interface {
	prompts(j *job, b *body) ([][]uint32, error)
	prefix() string
}

// name sets the ids of the job: X-Request-Id, or the body's id, or a random one.
func (j *job) name(r *httpRequest, b *body) {
	id := header(r, "X-Request-Id")
	if id == "" {
		if id = b.RequestID; id == "" {
			id = randomHex(8)
		}
	}
	j.id = j.format.(prompter).prefix() + id
	if l := j.c.incarnation; l.e.o.Engine == "sglang" {
		j.rids, _, _ = oneOrMany[string](b.RID, "rid", "a string")
		if j.id = randomHex(16); len(j.rids) > 0 {
			j.id = j.rids[0]
		}
	}
	j.blockLogID = header(r, "X-Request-Id")
	j.internal = j.id
	if r.path == "/v1/completions" {
		j.internal += "-0"
	}
	if o := &j.c.incarnation.e.o; o.release.IDSuffix() && !o.ClientIDs {
		j.internal += "-" + randomHex(4)
	}
	if h := j.params.handle; h != nil && !j.c.incarnation.e.o.release.RemoteID() {
		h.wire.RequestID = j.internal // decode asks by its own id
	}
}

func header(r *httpRequest, name string) string {
	v, _ := r.get(name)
	return v
}

// fingerprint returns the system_fingerprint of responses.
func (j *job) fingerprint() string {
	return fmt.Sprintf("vllm-%s-sim", j.c.incarnation.e.o.Version)
}
