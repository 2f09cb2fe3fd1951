package tokenize

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/tokenize/incremental"
)

// Source is the source of a prompt's tokens.
type Source uint8

// The sources, best first. None means that there is nothing to hash.
const (
	None        Source = iota
	FromRequest        // ids in the request
	FromCache          // from an earlier lookup
	FromEngine         // the engine's /tokenize
	FromText           // no ids: hash Text
	FromNative         // rendered and encoded in this process
	numSources
)

var sourceNames = [numSources]string{"none", "request", "cache", "engine", "text", "native"}

// String returns the name used in metrics and explain records: "request", "cache", "engine", "text",
// "native" or "none".
func (s Source) String() string {
	if s < numSources {
		return sourceNames[s]
	}
	return "unknown"
}

// Kind is the form of a request.
type Kind uint8

// The kinds, by the endpoint of the request.
const (
	Chat       Kind = iota // /v1/chat/completions
	Completion             // /v1/completions
	Responses              // /v1/responses
	Messages               // /v1/messages
	Generate               // /inference/v1/generate
	Native                 // SGLang's /generate
	Other                  // no KV affinity: no prompt is read
)

// Prompt is the result for a request's prompt. It is reused: Tokens keeps its capacity and belongs
// to the caller; Text is borrowed from the request's body where possible, and is valid as long as
// the body.
type Prompt struct {
	Source Source
	// Tokens are the ids of the prompt, of the first one if a request has several; empty in text
	// mode.
	Tokens []uint32
	// Text is what to hash in text mode. The text of a chat's next turn has that of this turn as
	// its prefix. It is only a key: JSON escapes and punctuation are left as the client sent them.
	Text []byte
	// Blocks are the hashes of the full blocks of incremental.BlockSize tokens with BlockSalt, if the
	// source has them. They belong to the caller like Tokens.
	Blocks    []blockhash.Seq
	BlockSalt blockhash.Salt
	// Count is the length in tokens of all prompts of the request: exact if one prompt's ids are
	// known, otherwise estimated.
	Count int
	// TextBytes are the bytes of the text that was rendered and encoded, for ids FromNative.
	// LongestToken is a number of characters that some token of the vocabulary has, 0 if unknown:
	// vLLM 0.32 does not tokenize texts that are longer than as many such tokens as its context has.
	TextBytes, LongestToken int
	// Verified says that ids from FromNative have been compared with the engine's, for another
	// prompt of the model, without a difference.
	Verified bool
	// Model is what has encoded ids from FromNative; nil for other sources.
	Model *InProcess
	// Err is why an engine's tokenizer was not used although it could have been, "" otherwise.
	Err string

	buf []byte // where Text is joined if it is not one piece of the body
}

// The values of Options.Mode. Ids in the request are used in all of them.
const (
	ModeAuto   = "auto"   // engine, else text
	ModeEngine = "engine" // engine, else nothing
	ModeText   = "text"   // never ask an engine
	ModeIDs    = "ids"    // ids in the request, else nothing
)

// Options configures a Tokenizer. Zero values select the defaults in brackets.
type Options struct {
	Mode           string        // [ModeAuto]; an unknown one counts as auto
	CacheBytes     int64         // bound of the cache [64 MiB]; negative: no cache
	Timeout        time.Duration // of one lookup, including the connection [250ms]
	MaxEngineBytes int           // longer requests are not sent to an engine [1 MiB]
	UnsupportedFor time.Duration // how long an engine without /tokenize is not asked again [30s]
	MaxBackoff     time.Duration // longest back-off of a failing engine [30s]
	VerifyRatio    float64       // share of the prompts tokenized in this process that are compared with the engine's ids [0.01]; negative: only the first ones
}

func (o *Options) defaults() {
	if o.Mode == "" {
		o.Mode = ModeAuto
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = 64 << 20
	}
	if o.Timeout <= 0 {
		o.Timeout = 250 * time.Millisecond
	}
	if o.MaxEngineBytes <= 0 {
		o.MaxEngineBytes = 1 << 20
	}
	if o.UnsupportedFor <= 0 {
		o.UnsupportedFor = 30 * time.Second
	}
	if o.VerifyRatio == 0 {
		o.VerifyRatio = 0.01
	}
	if o.MaxBackoff <= 0 {
		o.MaxBackoff = 30 * time.Second
	}
}

// Tokenizer finds token ids. It is safe for concurrent use. It has no goroutine of its own and
// needs no closing.
type Tokenizer struct {
	opt      atomic.Pointer[Options]
	cache    *cache
	texts    *incremental.Cache
	natives  atomic.Pointer[map[string]*InProcess]
	report   atomic.Pointer[func(Mismatch)]
	backoffs backoffs

	failedModels atomic.Pointer[map[string]string]

	sources                                         [numSources]atomic.Uint64
	coalesced, backedOff, refused, failed, timeouts atomic.Uint64

	unmodelled, nativeFailed, nativeCached, nativeEncoded, checks, checksFailed, mismatches, suspicions atomic.Uint64
}

// New returns a Tokenizer.
func New(opt Options) *Tokenizer {
	t := &Tokenizer{cache: newCache(), texts: incremental.NewCache(0)}
	t.backoffs = backoffs{now: time.Now, opt: &t.opt}
	t.Reload(opt)
	return t
}

// Reload applies all of opt. Running lookups keep their options. If the cache is over its new
// bound, the least recently used entries are dropped.
func (t *Tokenizer) Reload(opt Options) {
	opt.defaults()
	t.opt.Store(&opt)
	t.divideCache()
}

// Stats are the counters since New and the current content of the cache.
type Stats struct {
	FromRequest, FromCache, FromEngine, FromText, None uint64 // prompts by source

	Coalesced uint64 // prompts that waited for the same lookup of another request
	BackedOff uint64 // prompts for which the engine was not asked because it had failed
	Refused   uint64 // lookups that an engine answered with a 4xx
	Failed    uint64 // lookups that failed otherwise, including timeouts
	Timeouts  uint64 // lookups that exceeded Timeout

	FromNative    uint64 // prompts that were tokenized in this process
	Unmodelled    uint64 // prompts of such models that only an engine can render
	NativeFailed  uint64 // those that the library did not render or encode
	NativeCached  uint64 // ids that were not encoded again
	NativeEncoded uint64 // bytes of text that were encoded
	Checks        uint64 // prompts whose ids were compared with an engine's
	ChecksFailed  uint64 // comparisons for which the engine gave no ids
	Mismatches    uint64 // comparisons with a difference
	Suspicions    uint64 // calls of Suspect

	CacheEntries int // prompts, and parts of prompts that were tokenized in this process
	CacheBytes   int64
}

// Stats returns the counters. It may be called from any goroutine.
func (t *Tokenizer) Stats() Stats {
	s := Stats{
		FromRequest: t.sources[FromRequest].Load(), FromCache: t.sources[FromCache].Load(), FromEngine: t.sources[FromEngine].Load(),
		FromText: t.sources[FromText].Load(), None: t.sources[None].Load(),
		Coalesced: t.coalesced.Load(), BackedOff: t.backedOff.Load(), Refused: t.refused.Load(), Failed: t.failed.Load(), Timeouts: t.timeouts.Load(),
	}
	s.FromNative, s.Unmodelled, s.NativeFailed = t.sources[FromNative].Load(), t.unmodelled.Load(), t.nativeFailed.Load()
	s.NativeCached, s.NativeEncoded = t.nativeCached.Load(), t.nativeEncoded.Load()
	s.Checks, s.ChecksFailed, s.Mismatches = t.checks.Load(), t.checksFailed.Load(), t.mismatches.Load()
	s.Suspicions = t.suspicions.Load()
	s.CacheEntries, s.CacheBytes = t.cache.size()
	texts := t.texts.Stats()
	s.CacheEntries += texts.Segments
	s.CacheBytes += texts.Bytes
	return s
}

// Available reports whether ep's tokenizer would be asked now; false during its back-off after a
// failure. A caller that can choose among several engines prefers one that is available.
func (t *Tokenizer) Available(ep *upstream.Endpoint) bool {
	return ep != nil && !t.backoffs.isActive(ep.URL())
}

// Server is the program of an engine: which members its /tokenize takes.
type Server uint8

// The servers. Others than SGLang are asked as vLLM is.
const (
	VLLM Server = iota
	SGLang
)

// Prompt is PromptOf for an engine that is asked as vLLM is.
func (t *Tokenizer) Prompt(dst *Prompt, kind Kind, doc *jsonscan.Doc, ep *upstream.Endpoint, call *upstream.Call) {
	t.PromptOf(dst, kind, doc, VLLM, ep, call)
}

// PromptOf finds the tokens of the request in doc and sets dst. ep is the engine to ask if necessary,
// a server, chosen by the caller among those that serve the model; nil means none. Cancelling call ends
// the lookup; call may be nil, and must be unused, because the engine request uses it.
func (t *Tokenizer) PromptOf(dst *Prompt, kind Kind, doc *jsonscan.Doc, server Server, ep *upstream.Endpoint, call *upstream.Call) {
	*dst = Prompt{Tokens: dst.Tokens[:0], Blocks: dst.Blocks[:0], buf: dst.buf}
	t.find(dst, kind, doc, server, ep, call)
	t.sources[dst.Source].Add(1)
}

// EstimateMemory returns approximately how many bytes finding and hashing the tokens of the request
// in doc takes, besides its body: four bytes per id and as much again for an array that grows, an
// eighth of the text or of the ids' bytes for hashes. An engine's response has one id per four
// bytes of text, in six bytes, and the ids are stored twice.
func (t *Tokenizer) EstimateMemory(kind Kind, doc *jsonscan.Doc) int {
	if mayHoldIDs(kind, doc) {
		return 9 * countElements(doc.Raw(idsMember(kind)))
	}
	n := len(doc.Body)
	if len(t.nativeModels()) > 0 {
		return 6 * n // the input of the template, the text and their copies, besides the ids
	}
	if opt := t.opt.Load(); opt.Mode != ModeText && opt.Mode != ModeIDs && n <= opt.MaxEngineBytes {
		return 4 * n
	}
	return n / 8
}

// FromRequestIDs is Prompt for a request that contains its prompt's ids, so that no engine is
// asked; for other requests it does nothing and returns false.
func (t *Tokenizer) FromRequestIDs(dst *Prompt, kind Kind, doc *jsonscan.Doc) bool {
	if !mayHoldIDs(kind, doc) {
		return false
	}
	ids, ok := doc.ScannedIDs(idsMember(kind), dst.Tokens[:0])
	more := 0
	if !ok {
		var w promptWork
		w.read(kind, doc)
		if w.ids == nil {
			return false
		}
		var err error
		if ids, err = jsonscan.TokenIDs(ids, w.ids); err != nil {
			return false
		}
		more = w.extraTokens
	}
	*dst = Prompt{Source: FromRequest, Tokens: ids, Blocks: dst.Blocks[:0], Count: len(ids) + more, buf: dst.buf}
	t.sources[FromRequest].Add(1)
	return true
}

func (t *Tokenizer) find(dst *Prompt, kind Kind, doc *jsonscan.Doc, server Server, ep *upstream.Endpoint, call *upstream.Call) {
	w := getWork()
	defer w.put()
	w.server = server
	w.read(kind, doc)
	dst.Count = w.estimate
	if w.ids != nil {
		if ids, err := jsonscan.TokenIDs(dst.Tokens, w.ids); err == nil {
			dst.Source, dst.Tokens, dst.Count = FromRequest, ids, len(ids)+w.extraTokens
			return
		}
	}
	opt := t.opt.Load()
	if opt.Mode == ModeIDs || w.text == nil {
		return
	}
	if opt.Mode != ModeText && t.lookUp(dst, opt, w, doc, ep, call) {
		dst.Count = len(dst.Tokens) + w.extraTokens
		return
	}
	if opt.Mode != ModeEngine {
		dst.Source = FromText
		dst.Text, dst.buf = w.joinText(dst.buf)
	}
}

// lookUp tries the cache, then the engine, and reports whether either had the ids.
func (t *Tokenizer) lookUp(dst *Prompt, opt *Options, w *promptWork, doc *jsonscan.Doc, ep *upstream.Endpoint, call *upstream.Call) bool {
	if w.skipReason != "" {
		dst.Err = w.skipReason
		return false
	}
	w.compose(doc)
	if w.size > opt.MaxEngineBytes {
		dst.Err = "the prompt is longer than max_engine_bytes"
		return false
	}
	key := w.key()
	deadline := time.Now().Add(opt.Timeout)
	for {
		ids, f, leads := t.cache.get(key, ep != nil)
		switch {
		case ids != nil:
			dst.Source, dst.Tokens = FromCache, ids.appendTo(dst.Tokens)
			return true
		case f == nil:
			return false
		case leads:
			return t.lead(dst, w, ep, call, key, f, deadline)
		}
		t.coalesced.Add(1)
		if !f.wait(call, deadline) {
			dst.Err = "the same lookup of another request timed out"
			return false
		}
		if f.ids != nil {
			dst.Source, dst.Tokens = FromCache, f.ids.appendTo(dst.Tokens)
			return true
		}
		if !f.cut {
			dst.Err = f.err
			return false
		}
		// The leader's client left: the next waiter takes over.
	}
}

// lead performs the lookup for itself and for all waiters of f.
func (t *Tokenizer) lead(dst *Prompt, w *promptWork, ep *upstream.Endpoint, call *upstream.Call, key hash, f *lookup, deadline time.Time) bool {
	defer t.cache.finish(key, f) // also on a panic, so that no waiter waits forever
	url := ep.URL()
	if reason, ok := t.backoffs.allow(url, w.size); !ok {
		t.backedOff.Add(1)
		f.err, dst.Err = reason, reason
		return false
	}
	began := t.backoffs.now()
	ids, err := w.post(dst.Tokens, ep, call, deadline)
	if err == nil {
		t.backoffs.recordSuccess(url, w.size)
		dst.Source, dst.Tokens = FromEngine, ids
		f.ids = packIDs(ids)
		return true
	}
	f.cut = call.Cancelled()
	f.err = err.Error()
	dst.Err = f.err
	if !f.cut {
		t.count(err)
		// A request that first waited had little time left: its timeout says nothing.
		if !timedOut(err) || t.backoffs.now().Sub(began) >= t.opt.Load().Timeout/2 {
			t.backoffs.recordFailure(url, w.size, began, err)
		}
	}
	return false
}
