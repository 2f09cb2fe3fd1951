package tokenize

import (
	"bytes"
	"cmp"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/backoff"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/objpool"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/tokenize/chatinput"
	"sluice/router/tokenize/incremental"
)

// NativeModel renders and encodes in this process. It bounds its calls in time and memory, and may
// be called from any goroutine but an event loop. The input of its chats is what
// chatinput.Input.Chat holds. native/tokenizer.Model is one.
type NativeModel interface{ incremental.Renderer }

// InProcess is a model whose prompts are tokenized in this process. It compares some of them with the
// engines' own ids and stops being used when one differs, until the engine that differed restarts or
// leaves (Tokenizer.EngineLeft), or Retry is called.
type InProcess struct {
	name     string
	settings chatinput.Settings
	encoder  *incremental.Encoder
	rules    *incremental.Rules // nil: not known
	longest  int                // Prompt.LongestToken

	prompts atomic.Uint64

	mu        sync.Mutex
	checked   map[checkKey]uint32 // what has been compared, and with which incarnation of the engine
	equal     map[checkKey]uint32 // those of checked whose last comparison had no difference
	failing   map[checkKey]failing
	checking  string    // the engine with which a comparison runs, "" if none does
	left      bool      // that engine has left since
	verified  bool      // the last comparison had no difference
	mismatch  *Mismatch // nil: in use
	suspected time.Time // when Suspect has last had an effect
}

// checkKey is an engine and a kind of request: each kind is converted in its own way.
type checkKey struct {
	url  string
	kind Kind
}

// failing is an engine that gave no ids for its last comparison: an engine that fails is busy enough without
// being asked for every prompt.
type failing struct {
	until time.Time // no prompt is compared before
	delay backoff.Backoff
}

// Mismatch is a prompt whose ids in this process are not those of the engine. It does not contain
// the prompt.
type Mismatch struct {
	Model, URL     string
	API            string // the path of the request
	Position       int    // the first that differs
	Native, Engine int    // the numbers of ids
	incarnation    uint32
}

// NewInProcess returns an InProcess. rules may be nil.
func (t *Tokenizer) NewInProcess(name string, model NativeModel, rules *incremental.Rules, settings chatinput.Settings) (*InProcess, error) {
	n := &InProcess{name: name, settings: settings, rules: rules, encoder: incremental.NewEncoder(model, rules, t.texts), checked: map[checkKey]uint32{}, equal: map[checkKey]uint32{}, failing: map[checkKey]failing{}}
	if rules != nil {
		n.longest = rules.LongestAdded
	}
	return n, n.encoder.Check()
}

// SetNatives replaces the models that are tokenized in this process, by the name in requests. The
// cache's memory is shared with them from then on.
func (t *Tokenizer) SetNatives(models map[string]*InProcess) {
	t.natives.Store(&models)
	t.divideCache()
}

// SetFailed replaces the models that were to be tokenized in this process and could not be loaded, with
// the reasons.
func (t *Tokenizer) SetFailed(reasons map[string]string) { t.failedModels.Store(&reasons) }

// EngineLeft forgets what comparisons with the engine at a URL have shown. The caller calls it when
// the process there was removed or replaced. A model whose ids differed from those of that process is
// tried again: no other event may tell, because the URL need not return.
func (t *Tokenizer) EngineLeft(url string) {
	for _, n := range t.nativeModels() {
		n.forget(url)
	}
}

// ReportMismatches makes report be called, on a goroutine of its own, when the ids of a prompt that
// was tokenized in this process are not those of the engine.
func (t *Tokenizer) ReportMismatches(report func(Mismatch)) { t.report.Store(&report) }

// divideCache gives most of the memory to texts if there are models for it.
func (t *Tokenizer) divideCache() {
	all := max(0, t.opt.Load().CacheBytes)
	texts := int64(0)
	if len(t.nativeModels()) > 0 {
		texts = all / 8 * 7
	}
	t.texts.SetLimit(texts)
	t.cache.setLimit(all - texts)
}

func (t *Tokenizer) nativeModels() map[string]*InProcess {
	if p := t.natives.Load(); p != nil {
		return *p
	}
	return nil
}

// NativeQuery is a request whose prompt may be tokenized in this process.
type NativeQuery struct {
	// Model is the model's name in requests; Base, if not "", another of the same tokenizer.
	Model, Base string
	Kind        Kind
	Doc         *jsonscan.Doc
	// Scope separates prompts that must not share what is cached. It is the salt of their blocks.
	Scope uint64
	// Endpoint is an engine to compare with, nil if none; Incarnation is that of its process.
	Endpoint    *upstream.Endpoint
	Incarnation uint32
	// Contexts is asked only for prompts that may be cut to the model's context; nil: not known.
	Contexts Contexts
}

// Contexts knows the engines that may run a request.
type Contexts interface {
	// Contexts returns the shortest and the longest of their contexts in tokens, 0 if one is not known.
	Contexts() (shortest, longest int)
}

var nativeAPIs = [...]struct {
	api  chatinput.API
	path string
}{
	Chat:       {chatinput.Chat, "/v1/chat/completions"},
	Completion: {chatinput.Completions, "/v1/completions"},
	Responses:  {chatinput.Responses, "/v1/responses"},
	Messages:   {chatinput.Messages, "/v1/messages"},
}

// nativeWork is the scratch memory of one prompt.
type nativeWork struct {
	input chatinput.Input
}

var nativeWorks = objpool.Pool[nativeWork]{New: func() *nativeWork { return new(nativeWork) }}

// maxNativeScratch bounds the memory, in bytes, that a pooled nativeWork keeps.
const maxNativeScratch = 2 << 20

// maxNativeText is the longest text, in bytes, that is encoded in this process: about a million tokens. The
// library can need many times the size of a text without any boundary, and cannot be interrupted in it.
const maxNativeText = 4 << 20

func (w *nativeWork) put() {
	if w.input.Memory() <= maxNativeScratch {
		nativeWorks.Put(w)
	}
}

// PromptInProcess sets dst to the prompt's ids, and the hashes of their blocks with q.Scope as the
// salt, if they can be found in this process. Otherwise it returns false and leaves dst to Prompt. It
// calls the library to render and to encode, for at most the library's own timeout, and not at all for a
// completion that is cached. A request that the engines refuse has no ids: its prompt is what Prompt finds
// without an engine.
func (t *Tokenizer) PromptInProcess(dst *Prompt, q *NativeQuery) bool {
	n := t.native(q)
	if n == nil {
		return false
	}
	if mode := t.opt.Load().Mode; mode == ModeText || mode == ModeIDs {
		return false
	}
	inUse, verified := n.inUse(q)
	if !inUse {
		return false
	}
	w := nativeWorks.Get()
	if reason := w.input.Read(nativeAPIs[q.Kind].api, q.Doc.Body, &n.settings); reason != "" {
		refused := w.input.Refused
		w.put()
		return t.withoutIDs(dst, q, refused, &t.unmodelled)
	}
	if len(w.input.Text)+len(w.input.Chat) > maxNativeText {
		w.put()
		return t.withoutIDs(dst, q, false, &t.unmodelled)
	}
	out := incremental.Output{IDs: dst.Tokens[:0], Blocks: dst.Blocks[:0]}
	var found incremental.Result
	var err error
	if q.Kind == Completion {
		found, err = n.encoder.EncodeText(&out, q.Scope, w.input.Text, w.input.AddSpecial)
	} else {
		found, err = n.encoder.EncodeChat(&out, q.Scope, w.input.Chat, w.input.AddSpecial)
	}
	if err != nil { // w belongs to the call, which may still run
		var refusal interface{ Refused() bool }
		return t.withoutIDs(dst, q, errors.As(err, &refusal) && refusal.Refused(), &t.nativeFailed)
	}
	ids, known := n.truncate(out.IDs, w.input.Truncation, q, w.input.AddSpecial, found.Bytes)
	several := w.input.Prompts > 1
	w.put()
	if !known { // an engine's /tokenize does not cut
		t.unmodelled.Add(1)
		return t.withoutIDs(dst, q, true, nil)
	}
	cut := len(ids) < len(out.IDs)
	if cut {
		out.Blocks = out.Blocks[:0]
	}
	count := len(ids)
	if several {
		count += otherTokens(q)
	}
	*dst = Prompt{
		Source: FromNative, Tokens: ids, Count: count, Blocks: out.Blocks, BlockSalt: blockhash.Salt(q.Scope),
		TextBytes: found.Bytes, LongestToken: n.longest, Verified: verified, Model: n, buf: dst.buf,
	}
	t.sources[FromNative].Add(1)
	t.nativeCached.Add(uint64(found.Cached))
	t.nativeEncoded.Add(uint64(found.Encoded))
	if n.chooseCheck(q, t.opt.Load().VerifyRatio, t.backoffs.now) {
		t.check(n, q, ids, cut)
	}
	return true
}

// withoutIDs is the end of PromptInProcess for a prompt that has no ids here. If the engines refuse the
// request, none is asked for them; otherwise the prompt is counted.
func (t *Tokenizer) withoutIDs(dst *Prompt, q *NativeQuery, refused bool, counter *atomic.Uint64) bool {
	if refused {
		t.Prompt(dst, q.Kind, q.Doc, nil, nil)
		return true
	}
	counter.Add(1)
	return false
}

// otherTokens estimates the tokens of a completion's prompts after the first.
func otherTokens(q *NativeQuery) int {
	w := getWork()
	defer w.put()
	w.read(q.Kind, q.Doc)
	return w.extraTokens
}

// native returns the model that tokenizes q's prompt in this process, nil if there is none.
func (t *Tokenizer) native(q *NativeQuery) *InProcess {
	models := t.nativeModels()
	if len(models) == 0 || int(q.Kind) >= len(nativeAPIs) {
		return nil
	}
	if n := models[q.Model]; n != nil || q.Base == "" {
		return n
	}
	return models[q.Base]
}

// IsVerified reports whether ids of n have been compared with those of the process behind q.Endpoint, for a prompt of
// q's model and kind, without a difference since, and n is still what tokenizes the model's prompts.
func (t *Tokenizer) IsVerified(n *InProcess, q *NativeQuery) bool {
	if n == nil || q.Endpoint == nil || t.native(q) != n {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	was, ok := n.equal[checkKey{q.Endpoint.URL(), q.Kind}]
	return ok && was == q.Incarnation && n.mismatch == nil
}

// inUse reports whether n's ids are used. The engine that differed may have been replaced: then it
// is asked again.
func (n *InProcess) inUse(q *NativeQuery) (inUse, verified bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if m := n.mismatch; m != nil {
		if q.Endpoint == nil || q.Endpoint.URL() != m.URL || q.Incarnation == m.incarnation {
			return false, false
		}
		n.retry()
	}
	return true, n.verified
}

// Follow takes over from a model that n replaces, with another template, that its ids differed from those
// of an engine: that engine is still there.
func (n *InProcess) Follow(old *InProcess) {
	old.mu.Lock()
	m := old.mismatch
	old.mu.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mismatch = m
}

// Retry makes the model be used again if it is not because of a difference.
func (n *InProcess) Retry() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mismatch != nil {
		n.retry()
	}
}

// suspectInterval is the shortest time between two effects of Suspect.
const suspectInterval = time.Minute

// Suspect makes the next prompt of a kind be compared with each engine, at most once a minute: what an engine has
// reported of a prompt does not fit its ids.
func (t *Tokenizer) Suspect(n *InProcess, kind Kind) {
	t.suspicions.Add(1)
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	if n.mismatch != nil || now.Sub(n.suspected) < suspectInterval {
		return
	}
	n.suspected = now
	for key := range n.checked {
		if key.kind == kind {
			delete(n.checked, key)
		}
	}
}

// retry is called with mu held.
func (n *InProcess) retry() {
	n.mismatch, n.verified = nil, false
	clear(n.checked)
	clear(n.equal)
	clear(n.failing)
}

// forget drops what is known of an engine that has left. Its URL may return with another process
// whose incarnation has the same number.
func (n *InProcess) forget(url string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mismatch != nil && n.mismatch.URL == url {
		n.retry()
	}
	for kind := range Kind(len(nativeAPIs)) {
		delete(n.checked, checkKey{url, kind})
		delete(n.equal, checkKey{url, kind})
		delete(n.failing, checkKey{url, kind})
	}
	n.left = n.left || n.checking == url
}

// maxChecked bounds the engines and kinds of requests that are remembered.
const maxChecked = 4096

// chooseCheck reports whether q's prompt is to be compared: the first of its kind with each process
// of an engine, and then the given share, but none while its back-off lasts. One comparison of a model
// runs at a time.
func (n *InProcess) chooseCheck(q *NativeQuery, ratio float64, now func() time.Time) bool {
	count := float64(n.prompts.Add(1))
	sampled := ratio > 0 && int64(count*ratio) != int64((count-1)*ratio)
	if q.Endpoint == nil {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	key := checkKey{q.Endpoint.URL(), q.Kind}
	if was, ok := n.checked[key]; n.checking != "" || ok && was == q.Incarnation && !sampled {
		return false
	}
	if f, ok := n.failing[key]; ok && now().Before(f.until) {
		return false
	}
	if len(n.checked)+len(n.failing) >= maxChecked {
		clear(n.checked)
		clear(n.equal)
		clear(n.failing)
	}
	n.checking, n.left = key.url, false
	return true
}

// checkTimeout is the timeout of a comparison, which no request waits for.
const checkTimeout = 10 * time.Second

// check compares ids with the engine's in the background. cut says that they are not all of the text's.
func (t *Tokenizer) check(n *InProcess, q *NativeQuery, ids []uint32, cut bool) {
	c := comparison{kind: q.Kind, body: slices.Clone(q.Doc.Body), ep: q.Endpoint, scope: q.Scope, cut: cut, ids: slices.Clone(ids)}
	incarnation := q.Incarnation
	go func() {
		at, want, err := t.compare(n, &c)
		n.mu.Lock()
		left := n.left
		n.checking = ""
		if left {
			n.mu.Unlock()
			t.checksFailed.Add(1) // it says nothing about the engines that are there
			return
		}
		key := checkKey{c.ep.URL(), c.kind}
		switch {
		case err == nil || isUnsupported(err) || errors.Is(err, errUnsteady):
			n.checked[key] = incarnation
			delete(n.failing, key)
		case errors.Is(err, errRefused): // this prompt, not the engine: the next one is compared
		default: // a later prompt is compared
			f := n.failing[key]
			f.until = t.backoffs.now().Add(f.delay.Next(minDelay, t.opt.Load().MaxBackoff))
			n.failing[key] = f
		}
		if err != nil {
			n.mu.Unlock()
			t.checksFailed.Add(1)
			return
		}
		t.checks.Add(1)
		if at < 0 {
			n.equal[key] = incarnation
		} else {
			clear(n.equal)
		}
		if n.verified = at < 0; n.verified || n.mismatch != nil {
			n.mu.Unlock()
			return
		}
		m := &Mismatch{Model: n.name, URL: c.ep.URL(), API: nativeAPIs[c.kind].path, Position: at, Native: len(c.ids), Engine: want, incarnation: incarnation}
		n.mismatch = m
		n.mu.Unlock()
		t.mismatches.Add(1)
		if report := t.report.Load(); report != nil {
			(*report)(*m)
		}
	}()
}

// comparison is a prompt that is compared with an engine's.
type comparison struct {
	kind  Kind
	body  []byte
	ep    *upstream.Endpoint
	scope uint64
	cut   bool
	ids   []uint32
}

// errUnsteady says that a prompt has other ids each time.
var errUnsteady = errors.New("tokenize: the prompt changes each time that it is rendered")

// maxRenders bounds how often a prompt that changes with time is compared.
const maxRenders = 3

// compare returns the first position at which c's ids differ from the engine's, -1 if they are equal, and the
// number of the engine's. A template may print the time (strftime_now), and the engine renders later than the
// router did: a difference counts only if the router's text has not changed meanwhile.
func (t *Tokenizer) compare(n *InProcess, c *comparison) (at, engine int, err error) {
	before, err := c.ids, error(nil)
	if c.cut {
		before, err = n.again(c)
	}
	for range maxRenders {
		want, failed := t.engineIDs(c.kind, c.body, c.ep, c.cut)
		if failed != nil {
			return 0, 0, failed
		}
		if at = firstDifference(c.ids, want); at < 0 || c.kind == Completion || err != nil {
			return at, len(want), nil
		}
		now, failed := n.again(c)
		if failed != nil || firstDifference(before, now) < 0 {
			return at, len(want), nil
		}
		if c.cut {
			break // what of the new text is kept is not known here
		}
		if c.ids, before = now, now; firstDifference(now, want) < 0 {
			return -1, len(want), nil
		}
	}
	return 0, 0, errUnsteady
}

// again renders and encodes a chat once more, without cutting it.
func (n *InProcess) again(c *comparison) ([]uint32, error) {
	if c.kind == Completion {
		return c.ids, nil
	}
	w := nativeWorks.Get()
	if w.input.Read(nativeAPIs[c.kind].api, c.body, &n.settings) != "" {
		w.put()
		return nil, errRefused
	}
	var out incremental.Output
	if _, err := n.encoder.EncodeChat(&out, c.scope, w.input.Chat, w.input.AddSpecial); err != nil {
		return nil, err // w belongs to the call, which may still run
	}
	w.put()
	return out.IDs, nil
}

// firstDifference returns the first position at which a and b differ, -1 if they are equal.
func firstDifference(a, b []uint32) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) == len(b) {
		return -1
	}
	return min(len(a), len(b))
}

// engineIDs asks an engine for the ids of a request: vLLM's render endpoints (0.30 and later) take
// the request as it is; /tokenize takes what Prompt would send, and cuts nothing.
func (t *Tokenizer) engineIDs(kind Kind, body []byte, ep *upstream.Endpoint, cut bool) ([]uint32, error) {
	ids, err := postForIDs(ep, nativeAPIs[kind].path+"/render", [][]byte{body}, len(body), "token_ids")
	if err == nil || !isUnsupported(err) {
		return ids, err
	}
	var doc jsonscan.Doc
	if err := doc.Scan(body, jsonscan.Limits{}); err != nil {
		return nil, err
	}
	w := getWork()
	defer w.put()
	w.read(kind, &doc)
	if w.skipReason != "" || w.text == nil || cut || isIncomplete(kind, &doc) {
		return nil, errUnsupported
	}
	w.compose(&doc)
	return w.post(nil, ep, nil, time.Now().Add(checkTimeout))
}

// unsent are members that change a prompt and that /tokenize does not take.
var unsent = []string{"reasoning_effort", "documents", "reasoning", "thinking", "output_config"}

// isIncomplete reports whether /tokenize may give other ids than the request's own API.
func isIncomplete(kind Kind, doc *jsonscan.Doc) bool {
	vals := make([]jsonscan.Value, len(unsent))
	jsonscan.Members(doc.Body, vals, unsent...)
	return slices.ContainsFunc(vals, func(v jsonscan.Value) bool { return v.Kind > jsonscan.Null }) ||
		doc.Has(jsonscan.KeyTools) && bytes.Contains(doc.Raw(jsonscan.KeyToolChoice), []byte(`"none"`)) || // they may be left out
		kind == Messages && bytes.Contains(doc.Raw(jsonscan.KeyMessages), []byte(`"system"`)) // it may be moved to the start
}

func postForIDs(ep *upstream.Endpoint, path string, body [][]byte, size int, member string) ([]uint32, error) {
	req := upstream.Request{Method: "POST", Path: path, Fields: tokenizeFields, Body: body, Deadline: time.Now().Add(checkTimeout)}
	resp, err := ep.Do(&req, nil)
	if err != nil {
		return nil, &engineError{url: ep.URL(), cause: err}
	}
	defer resp.Release()
	answer, err := resp.ReadAll(nil, 32*size+256<<10)
	if err == nil {
		err = errorOf(resp.Status)
	}
	if err != nil {
		return nil, &engineError{url: ep.URL(), status: resp.Status, cause: err}
	}
	if it := jsonscan.Walk(answer); len(answer) > 0 && answer[0] == '[' && it.Next() {
		answer = it.Raw() // one for each prompt of a completion
	}
	ids, ok, err := jsonscan.FindTokenIDs(nil, answer, member)
	if err != nil || !ok {
		return nil, &engineError{url: ep.URL(), status: resp.Status, cause: errGarbage}
	}
	return ids, nil
}

// NativeState describes a model that is tokenized in this process, or was to be.
type NativeState struct {
	Model    string
	Verified bool      // the last comparison had no difference
	Mismatch *Mismatch // nil: in use, unless it could not be loaded
	Failed   string    // why it could not be loaded, "" if it was
}

// Use is "used", "mismatch" or "failed".
func (s *NativeState) Use() string {
	switch {
	case s.Failed != "":
		return "failed"
	case s.Mismatch != nil:
		return "mismatch"
	}
	return "used"
}

// NativeStates returns the state of each model, by name.
func (t *Tokenizer) NativeStates() []NativeState {
	var all []NativeState
	for name, n := range t.nativeModels() {
		n.mu.Lock()
		all = append(all, NativeState{Model: name, Verified: n.verified, Mismatch: n.mismatch})
		n.mu.Unlock()
	}
	if failed := t.failedModels.Load(); failed != nil {
		for name, reason := range *failed {
			all = append(all, NativeState{Model: name, Failed: reason})
		}
	}
	slices.SortFunc(all, func(a, b NativeState) int { return cmp.Compare(a.Model, b.Model) })
	return all
}

// String describes where the ids differ, for people.
func (m *Mismatch) String() string {
	return "at position " + strconv.Itoa(m.Position) + " of " + strconv.Itoa(m.Native) + " native and " + strconv.Itoa(m.Engine) + " engine ids of " + m.API
}
