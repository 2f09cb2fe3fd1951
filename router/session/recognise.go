package session

import (
	"strconv"

	"sluice/dataplane/jsonscan"
)

// MaxID is the maximum length of a session id in bytes.
const MaxID = 256

// Origin says what named a session.
type Origin uint8

// The origins, in the order of precedence: the router's own header, then the header of another
// router's API, then those of single clients, then those that several clients share, then members of
// the body. A client that sends several sends the most specific first: OpenCode sends the same value
// as x-session-affinity and X-Session-Id, and Codex sends a thread within a session.
const (
	None Origin = iota
	SluiceSession
	DynamoSession
	ClaudeCodeSession
	OpenCodeSession
	CodexThread
	CodexSession
	CodexSessionOld
	GrokConversation
	SessionAffinity
	SessionID
	PromptCacheKey
	PreviousResponse
	User

	NumOrigins
)

// names are the headers and members. docs/sessions.md has the same table with the sources, which
// TestDocument compares.
var names = [NumOrigins]string{
	SluiceSession: "X-Sluice-Session",
	// ai-dynamo/dynamo, docs/agents: the header of clients that are written for Dynamo.
	DynamoSession: "X-Dynamo-Session-Id",
	// Claude Code, code.claude.com/docs/en/llm-gateway-protocol: on every request.
	ClaudeCodeSession: "X-Claude-Code-Session-Id",
	// anomalyco/opencode, packages/opencode/src/session/llm/request.ts: to providers whose id begins
	// with "opencode". To all others it sends x-session-affinity and X-Session-Id.
	OpenCodeSession: "X-Opencode-Session",
	// openai/codex, codex-rs/codex-api/src/requests/headers.rs and pull request 21757: session-id and
	// thread-id since 0.131, session_id before. A thread is one agent's context, so subagents of one
	// session have their own.
	CodexThread:     "Thread-Id",
	CodexSession:    "Session-Id",
	CodexSessionOld: "session_id",
	// xAI, docs.x.ai/developers/advanced-api-usage/prompt-caching: chat completions.
	GrokConversation: "X-Grok-Conv-Id",
	SessionAffinity:  "X-Session-Affinity", // OpenCode, see above; clients of Fireworks (langchain-fireworks)
	SessionID:        "X-Session-Id",       // OpenCode, vLLM since 0.28, many routers

	PromptCacheKey:   "prompt_cache_key",     // OpenAI's API; Codex sends its thread's id
	PreviousResponse: "previous_response_id", // OpenAI's Responses API
	User:             "user",                 // OpenAI's API; only where sessions.user_member is set
}

// String returns the name of the header or member, "" for None.
func (o Origin) String() string {
	if o < NumOrigins {
		return names[o]
	}
	return ""
}

// IsHeader reports whether the origin is a request header.
func (o Origin) IsHeader() bool { return o > None && o < PromptCacheKey }

// Final are the headers with which a client says that this is the last request of its session. Their
// value is "true" or "1".
var Final = [...]string{"X-Sluice-Session-Final", "X-Dynamo-Session-Final"}

// Headers gives access to a request's headers. front.Exchange implements it.
type Headers interface {
	// Header returns the value of a header, nil if it is absent. Names are case-insensitive. The
	// value is borrowed.
	Header(name string) []byte
}

// FromHeaders returns the session that a request's headers name. The id is borrowed; it is nil if
// there is none. It may be invalid: see CheckID.
func FromHeaders(h Headers) (id []byte, from Origin) {
	for o := SluiceSession; o < PromptCacheKey; o++ {
		if v := h.Header(names[o]); len(v) > 0 {
			return v, o
		}
	}
	return nil, None
}

// IsFinal reports whether a request's headers say that it is the last one of its session.
func IsFinal(h Headers) bool {
	for _, name := range Final {
		switch string(h.Header(name)) {
		case "true", "1":
			return true
		}
	}
	return false
}

// FromBody returns the session that a request's body names by prompt_cache_key or, with userMember,
// by user. previous_response_id is the caller's, who knows which session a response belongs to. A
// value that is not a string, or is not a valid id, names no session: it is the engine's to refuse.
func FromBody(doc *jsonscan.Doc, userMember bool) (id []byte, from Origin) {
	if id = member(doc, jsonscan.KeyPromptCacheKey); id != nil {
		return id, PromptCacheKey
	}
	if userMember {
		if id = member(doc, jsonscan.KeyUser); id != nil {
			return id, User
		}
	}
	return nil, None
}

func member(doc *jsonscan.Doc, key jsonscan.Key) []byte {
	const longestEscape = 6 // \u0041
	if !doc.Has(key) || doc.Values[key].Kind != jsonscan.String || len(doc.Raw(key)) > longestEscape*MaxID+2 {
		return nil
	}
	id := doc.String(key)
	if CheckID(id) != "" {
		return nil
	}
	return id
}

// CheckID returns what is wrong with an id, "" if nothing is.
func CheckID(id []byte) (wrong string) {
	if len(id) == 0 {
		return "it is empty; want 1 to 256 bytes"
	}
	if len(id) > MaxID {
		return "it has " + strconv.Itoa(len(id)) + " bytes; want at most 256 bytes"
	}
	for _, c := range id {
		if c < ' ' || c == 0x7f {
			return "it has a control character; want 1 to 256 bytes without any"
		}
	}
	return ""
}
