package pd

import (
	"strconv"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// Handover is one attempt of one request as a Family sees it. It is read only, and
// valid until the function it was given to returns.
type Handover struct {
	Kind   front.Kind
	Path   string // the client's endpoint
	Doc    *jsonscan.Doc
	Stream bool     // the client asked for a stream
	Tokens []uint32 // the prompt's ids, exact; empty when not known
	// RequestID is the X-Request-Id of both legs.
	RequestID string
	// Token is random, 0 … 2^63-1, and new for each attempt.
	Token   uint64
	Prefill *worker.Rank
	Decode  *worker.Rank // nil until chosen
	// Fact is what an Asker learned of Prefill.
	PeerInfo string
	// Answer is prefill's whole 200 answer and Handle what the family found in
	// it; nil before, and when decode runs plainly.
	Answer, Handle []byte
	// EngineID is what the hand-over calls Prefill's engine, as it stands in JSON, where
	// that is an id of one process: Handle and Fact put it here. Nil: it was not told.
	EngineID []byte
	// Ticket is the JSON object that the decode engine's connector is lent a slot
	// of the completion board by; nil: it runs none, or nobody would hear it.
	Slot []byte
	// PrefillCached is how many tokens the prefill engine reported as found in
	// its cache, -1 when it said nothing.
	PrefillCached int
	// IDs: the decode engine is to be asked for token ids, for the runner to keep;
	// a Family that writes a body of its own must do that.
	WantTokenIDs bool
	// Trial: this decode goes before prefill (DecodeFirst).
	Trial bool

	handleMembers handleMembers // of Handle, where the family's Handle has read them
	promptIDs     []byte        // of Answer: prompt_token_ids, where Handle has found an array

	rawTokens []byte // Tokens as the client's body spells them; nil: it does not

	prefillToken    prefillToken // LMCache's, of Answer
	decodeContinues tristate     // whether decode goes on behind it, see continues

	textOnlyCache *tristate // what textOnly found, of the request; nil: it is not kept
}

// tristate is the answer to a question about the request that takes a walk over its prompt.
type tristate uint8

const (
	triUnknown tristate = iota
	triFalse
	triTrue
)

// textOnly says whether a chat's messages hold nothing but text.
func (p *Handover) textOnly() bool {
	if p.textOnlyCache != nil && *p.textOnlyCache != triUnknown {
		return *p.textOnlyCache == triTrue
	}
	is := tokenize.TextOnly(p.Doc.Raw(jsonscan.KeyMessages))
	if p.textOnlyCache != nil {
		*p.textOnlyCache = triFalse
		if is {
			*p.textOnlyCache = triTrue
		}
	}
	return is
}

// LegRequest is one engine call as a Family writes it. The zero Leg is the client's
// body at the client's endpoint, the rank addressed by header.
type LegRequest struct {
	Path string // [the client's endpoint]
	// Edits of the client's body. Values are constants, borrow from the Pair, or
	// come from the Leg's own room (Int, Quote, Room).
	Edits []jsonscan.Edit
	// Body takes the place of the client's body with Edits when not nil.
	Body []byte
	// RankInBody: the Family addressed the rank; no rank header is sent.
	RankInBody bool

	buf []byte
}

func (l *LegRequest) reset() {
	*l = LegRequest{Edits: l.Edits[:0], buf: l.buf[:0]}
}

// Set, Replace and Remove add an edit; see jsonscan.Op.
func (l *LegRequest) Set(k jsonscan.Key, raw []byte) {
	l.Edits = append(l.Edits, jsonscan.Edit{Key: k, Op: jsonscan.Set, Value: raw})
}

// Replace: see Set.
func (l *LegRequest) Replace(k jsonscan.Key, raw []byte) {
	l.Edits = append(l.Edits, jsonscan.Edit{Key: k, Op: jsonscan.Replace, Value: raw})
}

// Remove: see Set.
func (l *LegRequest) Remove(k jsonscan.Key) {
	l.Edits = append(l.Edits, jsonscan.Edit{Key: k, Op: jsonscan.Remove})
}

// Int renders a number in the leg's room.
func (l *LegRequest) Int(n uint64) []byte {
	from := len(l.buf)
	l.buf = strconv.AppendUint(l.buf, n, 10)
	return l.buf[from:len(l.buf):len(l.buf)]
}

// Quote renders text of visible ASCII (hosts, ids) as a JSON string.
func (l *LegRequest) Quote(s string) []byte {
	from := len(l.buf)
	l.buf = append(appendEscaped(append(l.buf, '"'), s), '"')
	return l.buf[from:len(l.buf):len(l.buf)]
}

// appendEscaped writes text of visible ASCII as it stands in a JSON string.
func appendEscaped(dst []byte, s string) []byte {
	for i := range len(s) {
		if s[i] == '"' || s[i] == '\\' {
			dst = append(dst, '\\')
		}
		dst = append(dst, s[i])
	}
	return dst
}

// Render lets build append a value of any size to the leg's room and gives it.
func (l *LegRequest) Render(build func(dst []byte) []byte) []byte {
	from := len(l.buf)
	l.buf = build(l.buf)
	return l.buf[from:len(l.buf):len(l.buf)]
}

// limitToOneToken limits the output to one token, without a minimum that would keep
// the engine from ending with the reason "length", the one end after which
// every release of vLLM keeps the blocks.
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

// hasThinkingBudget says whether a request has a budget of thinking, which vLLM (0.32,
// AnthropicMessagesRequest) holds against max_tokens but in the prefill leg of a hand-over
// by handle.
func hasThinkingBudget(p *Handover) bool {
	if p.Kind != front.Messages || !p.Doc.Has(jsonscan.KeyThinking) {
		return false
	}
	raw := p.Doc.Raw(jsonscan.KeyThinking)
	kind, ok, _ := jsonscan.Find(raw, "type")
	return ok && string(raw[kind.Start:kind.End]) == `"enabled"`
}

// removeThinkingBudget takes such a budget out of a leg of one token. What the prompt ends with
// may differ by it, what it begins with does not.
func (l *LegRequest) removeThinkingBudget(p *Handover) {
	if hasThinkingBudget(p) {
		l.Remove(jsonscan.KeyThinking)
	}
}

// limitForKVRelease asks for as little as has a decode engine read the KV and let go of it: one
// token; or, where a budget stands against that, and its prompt must be prefill's to the
// last token, a stream, to be left behind its first event.
func (l *LegRequest) limitForKVRelease(p *Handover) (stream bool) {
	if hasThinkingBudget(p) {
		l.Set(jsonscan.KeyStream, jsonTrue)
		return true
	}
	l.disableStream()
	l.limitToOneToken(p)
	return false
}

// disableStream asks for one whole answer.
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

// hostOf is the host of a rank's URL, an IPv6 address in its brackets.
func hostOf(r *worker.Rank) string {
	_, rest, _ := strings.Cut(r.URL, "://")
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		rest = rest[:i]
	}
	if i := strings.LastIndexByte(rest, ':'); i > strings.LastIndexByte(rest, ']') {
		rest = rest[:i]
	}
	return rest
}

// workerOption is the value of a worker's family key for one of its ranks: with one
// value given it counts for all, else each rank has its own, in the ranks'
// order. "" when there is none.
func workerOption(r *worker.Rank, key string) string {
	values := r.Worker.Spec.Options[key]
	switch {
	case len(values) == 0:
		return ""
	case len(values) == 1:
		return values[0]
	}
	for i, other := range r.Worker.Ranks {
		if other == r && i < len(values) {
			return values[i]
		}
	}
	return ""
}

// versionAtLeast says whether a rank's engine is known to be of release major.minor.patch
// or later; an unknown one is not.
func versionAtLeast(r *worker.Rank, major, minor, patch int) bool {
	if r == nil {
		return false
	}
	return VersionAtLeast(r.Worker.Info().Version, major, minor, patch)
}

// versionBefore says whether a rank's engine is known to be of a release before
// major.minor.patch.
func versionBefore(r *worker.Rank, major, minor, patch int) bool {
	return r.Worker.Info().Version != "" && !versionAtLeast(r, major, minor, patch)
}

// parseVersion reads "0.32.0+cpu", "v0.5.10.post1", "0.26.0rc1": the leading numbers.
// A text that begins with no number is {-1}.
func parseVersion(version string) (v [3]int) {
	s := strings.TrimPrefix(version, "v")
	for i := range v {
		n, digits := 0, 0
		for digits < len(s) && digits < 6 && s[digits]-'0' <= 9 {
			n = n*10 + int(s[digits]-'0')
			digits++
		}
		if digits == 0 {
			if i == 0 {
				v[0] = -1
			}
			return v
		}
		v[i] = n
		if s = s[digits:]; len(s) == 0 || s[0] != '.' {
			return v
		}
		s = s[1:]
	}
	return v
}

// atoi reads a port or another small number, 0 for anything else.
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
