package family

import (
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// Handover is one attempt of one request as a Family sees it. It is read-only and valid until the
// function that receives it returns.
type Handover struct {
	Kind   front.Kind
	Path   string // the client's endpoint
	Doc    *jsonscan.Doc
	Stream bool     // the client asked for a stream
	Tokens []uint32 // the exact token ids of the prompt; empty if unknown
	// RequestID is the X-Request-Id of both legs.
	RequestID string
	// Token is a random number in 0 … 2^63-1, new for each attempt.
	Token   uint64
	Prefill *worker.Rank
	Decode  *worker.Rank // nil until chosen
	// PeerInfo is what a PeerInfoFetcher or PeerInfoLearner knows about Prefill.
	PeerInfo string
	// Answer is prefill's complete 200 response, and Handle is the handle that the family found in
	// it. Both are nil before prefill has answered and if decode runs without a hand-over.
	Answer, Handle []byte
	// EngineID is the raw JSON id of Prefill's engine, if the protocol has an id per process.
	// Handle or ParsePeerInfo sets it. It is nil if unknown.
	EngineID []byte
	// Slot is the JSON object that leases a slot of the completion board to the decode engine's
	// connector. It is nil if the engine runs no connector or no report could arrive.
	Slot []byte
	// PrefillCached is the number of tokens that the prefill engine reported as cached, -1 if it
	// reported none.
	PrefillCached int
	// WantTokenIDs says that the decode leg must ask the engine for token ids, which the runner
	// keeps. A Family that writes its own body must ask for them.
	WantTokenIDs bool
	// ByIDs says that the legs carry Tokens as their prompt, where the family and the engine's API
	// allow it, so that the engines do not render and tokenize the prompt again.
	ByIDs bool
	// Trial says that this decode leg runs before prefill (DecodeFirst).
	Trial bool

	handleMembers handleMembers // of Handle, if the family's Handle method has set them
	promptIDs     []byte        // prompt_token_ids in Answer; nil if it is not an array

	RawTokens []byte // Tokens as written in the client's body; nil if it has no ids

	prefillToken    prefillToken // of Answer; used by lmcache
	decodeContinues Tristate     // result of the function decodeContinues

	TextOnlyCache *Tristate // cached result of textOnly; nil: not cached
}

// Tristate caches a boolean whose computation scans the prompt.
type Tristate uint8

const (
	triUnknown Tristate = iota
	triFalse
	triTrue
)

// textOnly reports whether a chat's messages contain only text.
func (p *Handover) textOnly() bool {
	if p.TextOnlyCache != nil && *p.TextOnlyCache != triUnknown {
		return *p.TextOnlyCache == triTrue
	}
	is := tokenize.TextOnly(p.Doc.Raw(jsonscan.KeyMessages))
	if p.TextOnlyCache != nil {
		*p.TextOnlyCache = triFalse
		if is {
			*p.TextOnlyCache = triTrue
		}
	}
	return is
}

// LegRequest is one engine call, written by a Family. The zero value sends the client's body to the
// client's endpoint and addresses the rank by a header.
type LegRequest struct {
	Path string // the client's endpoint if empty
	// Edits are edits of the client's body. A value is a constant, borrows from the Handover, or
	// comes from the leg's buffer (Int, Quote, Render).
	Edits []jsonscan.Edit
	// Body replaces the client's body and Edits if it is not nil.
	Body []byte
	// RankInBody says that the body addresses the rank, so no rank header is sent.
	RankInBody bool

	buf []byte
}

// Reset returns l to its zero value and keeps its buffers. Slices that borrow from them become invalid.
func (l *LegRequest) Reset() {
	*l = LegRequest{Edits: l.Edits[:0], buf: l.buf[:0]}
}

// Set adds an edit; see jsonscan.Op.
func (l *LegRequest) Set(k jsonscan.Key, raw []byte) {
	l.Edits = append(l.Edits, jsonscan.Edit{Key: k, Op: jsonscan.Set, Value: raw})
}

// Replace adds an edit; see jsonscan.Op.
func (l *LegRequest) Replace(k jsonscan.Key, raw []byte) {
	l.Edits = append(l.Edits, jsonscan.Edit{Key: k, Op: jsonscan.Replace, Value: raw})
}

// Remove adds an edit; see jsonscan.Op.
func (l *LegRequest) Remove(k jsonscan.Key) {
	l.Edits = append(l.Edits, jsonscan.Edit{Key: k, Op: jsonscan.Remove})
}

// Int renders a number in the leg's buffer.
func (l *LegRequest) Int(n uint64) []byte {
	from := len(l.buf)
	l.buf = strconv.AppendUint(l.buf, n, 10)
	return l.buf[from:len(l.buf):len(l.buf)]
}

// Quote renders visible ASCII text (hosts, ids) as a JSON string in the leg's buffer.
func (l *LegRequest) Quote(s string) []byte {
	from := len(l.buf)
	l.buf = append(appendEscaped(append(l.buf, '"'), s), '"')
	return l.buf[from:len(l.buf):len(l.buf)]
}

// appendEscaped appends visible ASCII text with JSON escapes.
func appendEscaped(dst []byte, s string) []byte {
	for i := range len(s) {
		if s[i] == '"' || s[i] == '\\' {
			dst = append(dst, '\\')
		}
		dst = append(dst, s[i])
	}
	return dst
}

// Render calls build to append a value of any size to the leg's buffer and returns that value.
func (l *LegRequest) Render(build func(dst []byte) []byte) []byte {
	from := len(l.buf)
	l.buf = build(l.buf)
	return l.buf[from:len(l.buf):len(l.buf)]
}

// limitToOneToken limits the output to one token and removes the minimum, which would keep the
// engine from ending with the reason "length". Only after that reason do all releases of vLLM keep
// the blocks.
func (l *LegRequest) limitToOneToken(p *Handover) {
	switch p.Kind {
	case front.Chat, front.Completions:
		l.Set(jsonscan.KeyMaxTokens, jsonOne)
		l.Replace(jsonscan.KeyMaxCompletionTokens, jsonOne)
		l.Remove(jsonscan.KeyMinTokens)
		l.Remove(jsonscan.KeyMinCompletionTokens)
	case front.ResponsesAPI:
		l.Set(jsonscan.KeyMaxOutputTokens, jsonOne)
	case front.Messages:
		l.Set(jsonscan.KeyMaxTokens, jsonOne)
	case front.Generate:
		if !p.Doc.Has(jsonscan.KeySamplingParams) {
			l.Set(jsonscan.KeySamplingParams, oneTokenSampling)
			return
		}
		l.Set(jsonscan.KeySamplingMaxTokens, jsonOne)
		l.Remove(jsonscan.KeySamplingMinTokens)
	}
}

// hasThinkingBudget reports whether a request has a thinking budget. vLLM (0.32,
// AnthropicMessagesRequest) rejects a budget above max_tokens, except in the prefill leg of a
// hand-over by handle.
func hasThinkingBudget(p *Handover) bool {
	if p.Kind != front.Messages || !p.Doc.Has(jsonscan.KeyThinking) {
		return false
	}
	raw := p.Doc.Raw(jsonscan.KeyThinking)
	kind, ok, _ := jsonscan.Find(raw, "type")
	return ok && string(raw[kind.Start:kind.End]) == `"enabled"`
}

// removeThinkingBudget removes the thinking budget from a leg of one token. The budget may change
// the end of the rendered prompt but not its beginning.
func (l *LegRequest) removeThinkingBudget(p *Handover) {
	if hasThinkingBudget(p) {
		l.Remove(jsonscan.KeyThinking)
	}
}

// LimitForKVRelease limits a decode leg to the least that makes its engine read and free the KV:
// one token. With a thinking budget, which must stay because the prompt must equal prefill's, it
// asks for a stream instead, which the caller closes after the first event.
func (l *LegRequest) LimitForKVRelease(p *Handover) (stream bool) {
	if hasThinkingBudget(p) {
		l.Set(jsonscan.KeyStream, jsonTrue)
		return true
	}
	l.disableStream()
	l.limitToOneToken(p)
	return false
}

// disableStream asks for a non-streaming response.
func (l *LegRequest) disableStream() {
	l.Set(jsonscan.KeyStream, jsonFalse)
	l.Remove(jsonscan.KeyStreamOptions)
}

var (
	jsonOne   = []byte("1")
	jsonTrue  = []byte("true")
	jsonFalse = []byte("false")

	oneTokenSampling = []byte(`{"max_tokens":1}`)
)

// atoi parses a port or another number of up to nine digits. It returns 0 for anything else.
func atoi(s string) int {
	n := 0
	for i := range len(s) {
		d := s[i] - '0'
		if d > 9 || i > 8 {
			return 0
		}
		n = n*10 + int(d)
	}
	return n
}

func appendUint(dst []byte, n uint64) []byte { return strconv.AppendUint(dst, n, 10) }

// LimitToPrefillOnly asks for one token of one choice without streaming and without a KV handle.
func (l *LegRequest) LimitToPrefillOnly(p *Handover) {
	l.limitToOneToken(p)
	l.removeThinkingBudget(p)
	l.disableStream()
	for _, k := range [...]jsonscan.Key{jsonscan.KeyN, jsonscan.KeyBestOf, jsonscan.KeyUseBeamSearch, jsonscan.KeyEcho} {
		l.Remove(k)
	}
	switch p.Kind {
	case front.Generate:
		if p.Doc.Has(jsonscan.KeySamplingParams) {
			l.Remove(jsonscan.KeySamplingN)
		}
	case front.NativeGenerate:
		if raw := p.Doc.Raw(jsonscan.KeySamplingParams); len(raw) > 0 && raw[0] == '{' {
			l.Set(jsonscan.KeySamplingMaxNewTokens, jsonOne)
			l.Remove(jsonscan.KeySamplingN)
		} else {
			l.Set(jsonscan.KeySamplingParams, oneNewToken)
		}
	}
}

var oneNewToken = []byte(`{"max_new_tokens":1}`)

// AskTokenIDs asks the engine for the token ids of its output, unless the leg has a body of its own.
func (l *LegRequest) AskTokenIDs() {
	if l.Body == nil {
		l.Set(jsonscan.KeyReturnTokenIDs, jsonTrue)
	}
}

// Memory returns the size of the leg's buffer in bytes.
func (l *LegRequest) Memory() int { return cap(l.buf) }
