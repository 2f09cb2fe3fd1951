// Package family has the hand-over protocol of each engine family, one file a family.
//
// A Family (family.go) is a set of pure functions: they write the bodies of the legs (LegRequest), find
// the handle in prefill's response, and say by Traits what a failure means. They choose no rank and
// send nothing; package pd does that. A Family sees one attempt of one request as a Handover.
//
// judgement.go judges the responses of engines of any family: which failures may run again, whether a
// stream begins with an error, and which member of a response the client must not see.
//
// CONTRIBUTING.md says how to add a family: a file here, and what the configuration, the simulator, the
// tests and the documents need.
package family

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"sluice/router/config"
	"sluice/router/worker"
)

// Family is the hand-over protocol of one engine family, as small functions in a file of its own.
// The runner chooses the ranks, sends the legs in the family's Order, and decides by the family's
// Traits what each failure means.
//
// The functions run on the request path. They do not block, they retain no argument, and they write
// into the buffers of the LegRequest. A Family is a value without mutable state that all requests
// share.
//
// A Family may implement further interfaces: PeerInfoFetcher and PeerInfoLearner (information about
// a prefill rank), CompletionWaiter (decode waits for completion notifications), Decliner
// (decode may decline because too few blocks are cached), AnswerRewriter, FinalAnswerer and
// AnswerMerger (responses that the router changes), and RequestFilter (requests that the family
// cannot hand over).
type Family interface {
	// Name returns the family's name in the configuration and in explain records.
	Name() string
	// Traits returns the properties that the runner needs. They must be the same on every call.
	Traits() Traits
	// Order returns the order of the legs between h.Prefill and h.Decode. h.Decode may not be
	// chosen yet.
	Order(h *Handover) Order
	// Prefill writes the prefill leg. h.Decode is set if the Order is Concurrent or the Traits have
	// NamesDecode.
	Prefill(leg *LegRequest, h *Handover)
	// Handle finds the handle for decode in a 200 response of prefill. For Concurrent pairs the
	// runner calls it only to check peer information (PeerInfoLearner). Handle returns a wrapped
	// ErrIncompleteHandle if the response has no handle that a decode engine could use; decode then
	// runs the whole request. It returns a wrapped ErrPrefillFailed if the response says that the
	// engine failed, and ErrFinal if the response is the whole response to the client (see
	// AnswerRewriter). The result may borrow from body.
	Handle(h *Handover, body []byte) (handle []byte, err error)
	// Decode writes the decode leg, with h.Handle after prefill and without a handle in Concurrent
	// pairs.
	Decode(leg *LegRequest, h *Handover)
}

// Order says when the legs of a pair run.
type Order uint8

// Orders of the legs.
const (
	// PrefillFirst runs prefill and then decode with prefill's handle.
	PrefillFirst Order = iota
	// Concurrent runs both legs at once. The engines find each other by values that the router
	// chooses in advance (Handover.Token, as a bootstrap room or transfer id). If one leg fails,
	// the runner cancels the other. A retry has new ranks and a new Token.
	Concurrent
	// DecodeFirst tries decode. If decode declines (Decliner), it runs prefill and then decode
	// again.
	DecodeFirst
)

// Traits are the properties of a family that the runner needs.
type Traits struct {
	// Kinds are the requests that can be handed over. Other requests run on one rank, or are
	// refused if NoDecodeOnly is set.
	Kinds Kinds
	// Batches: one hand-over serves several prompts and choices. If false, such requests run
	// without a hand-over.
	Batches bool
	// NoDecodeOnly: a decode engine of this family cannot prefill. Neither a fallback to decode
	// alone nor conditional disaggregation is possible.
	NoDecodeOnly bool
	// NamesDecode: the prefill leg names the decode rank, so the runner chooses that rank before it
	// sends prefill.
	NamesDecode bool
	// PrefillNeedsDecode: a prefill engine accepts a prompt only together with the decode engine
	// that will fetch it, so there are no prefill-only requests.
	PrefillNeedsDecode bool
	// NoLease: a handle leases nothing on the prefill engine. If false, the runner sends decode
	// within PD.Lease of prefill's response or runs prefill again, sends a handle to one engine
	// only, and follows the leased rows of pd/abort's rules when the client disconnects.
	NoLease bool
	// Refetchable: in a Concurrent pair decode requests blocks from prefill by an id and gets none
	// if the id no longer exists. A second decode may therefore request them in order to have them
	// freed.
	Refetchable bool
	// JoinsByRequestID: both engines find the hand-over by the legs' X-Request-Id alone, so no two
	// requests may have the same id, whether at once or shortly after each other.
	JoinsByRequestID bool
	// OldJoinsByRequestID: JoinsByRequestID applies to engines before vLLM 0.14 and to later ones
	// that run without random id suffixes. Their prefill frees, or hands over, the blocks of the
	// last request with the id.
	OldJoinsByRequestID bool
	// Pulls: decode pulls the blocks with vLLM's NIXL handle, so the side channel can renew and
	// release the lease of the handle. From vLLM 0.21 on a decode engine of this protocol may tell
	// prefill twice to free the blocks when its non-streaming request is cancelled.
	Pulls bool
	// PromptIDs: the legs can carry the prompt as token ids (Handover.ByIDs).
	PromptIDs bool
	// Reports: engines of this family may run Sluice's connector, which reports every transfer
	// (Options.Transfers).
	Reports bool
}

// JoinsLegs reports whether the engines of h identify a hand-over by X-Request-Id alone. decode are the
// candidates of the decode leg. Engines of different releases refuse each other; an engine of unknown
// release may be an old one. A newer engine may run without random suffixes
// (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION), which the runner learns from the engine's first handle.
func (t *Traits) JoinsLegs(h *Handover, decode []*worker.Rank) bool {
	if t.JoinsByRequestID || !t.OldJoinsByRequestID || h.Prefill == nil {
		return t.JoinsByRequestID
	}
	rank := h.Prefill
	if rank.Worker.Info().Version == "" && len(decode) > 0 {
		rank = decode[0] // a sidecar probes its own engine but not the engines that requests name
	}
	return !rank.VersionAtLeast(0, 14, 0) || h.PeerInfo == plainRequestIDs
}

// Kinds is a set of front.Kind.
type Kinds uint16

// kindsOf returns a set of the given kinds.
func kindsOf(kinds ...front.Kind) (set Kinds) {
	for _, k := range kinds {
		set |= 1 << k
	}
	return set
}

// Has reports whether k is in the set.
func (s Kinds) Has(k front.Kind) bool { return s>>k&1 != 0 }

// PeerInfoFetcher is a Family that needs information about a prefill rank from outside the rank's
// API, such as the engine's id at its bootstrap server. The runner fetches it once per rank and
// sets Handover.PeerInfo. It keeps the information until a hand-over with the rank fails or the
// worker is removed.
type PeerInfoFetcher interface {
	// PeerInfoURL returns the URL from which to GET the information; base is "" if there is nothing
	// to fetch. The runner calls it only if it does not have the information.
	PeerInfoURL(h *Handover) (base, path string)
	// ParsePeerInfo parses a 200 response.
	ParsePeerInfo(h *Handover, body []byte) (string, error)
}

// PeerInfoLearner is a Family that learns about a prefill rank from its handles. The runner keeps
// the information in the same way as that of a PeerInfoFetcher.
type PeerInfoLearner interface {
	// LearnPeerInfo appends the information about h.Prefill that h.Handle contains, if any.
	LearnPeerInfo(dst []byte, h *Handover) []byte
}

// CompletionWaiter is a Family whose decode must wait for completion notifications
// (Options.Completions) in addition to prefill's response.
type CompletionWaiter interface {
	// ExpectedCompletions returns the id and the number of the completions, 0 if decode need not
	// wait. The runner calls it before it sends the prefill leg.
	ExpectedCompletions(h *Handover) (id string, count int)
}

// Decliner is a Family with the order DecodeFirst.
type Decliner interface {
	// Declined reports whether decode declines because too few blocks are cached. answer is
	// decode's whole response or the beginning of a stream; more asks for more of an undecided
	// stream.
	Declined(answer []byte) (declined, more bool)
}

// AnswerRewriter is a Family whose decode responses the router changes before the client gets them:
// they have another format, are incomplete, or have members that clients must not see.
type AnswerRewriter interface {
	// Body appends the client's version of a complete 200 response.
	Body(dst []byte, h *Handover, body []byte) []byte
	// Events returns the Rewriter of a stream; nil leaves the stream unchanged. The Rewriter must
	// not retain h or what it borrows from h, except h.Answer for an AnswerMerger.
	Events(h *Handover) sse.Rewriter
}

// FinalAnswerer is an AnswerRewriter whose prefill response may be the whole response (ErrFinal).
type FinalAnswerer interface {
	AnswerRewriter
	// Final appends the client's version of the response as a complete event stream.
	Final(dst []byte, h *Handover, body []byte) []byte
}

// AnswerMerger is an AnswerRewriter that combines prefill's and decode's responses for some
// requests.
type AnswerMerger interface {
	AnswerRewriter
	// MergesAnswers reports whether the request needs both responses. The runner then waits for
	// prefill's response, in any order of the legs, before it sends anything to the client.
	// Handover.Answer has that response for as long as a stream lasts.
	MergesAnswers(h *Handover) bool
}

// RequestFilter is a Family that cannot hand over every request of its Kinds.
type RequestFilter interface {
	// Unsupported returns one word for why one worker must run the request, "" if the family can
	// hand the request over.
	Unsupported(r *Request) string
}

// Request is a client's request before the choice of ranks, as a RequestFilter sees it.
type Request struct {
	Kind   front.Kind
	Doc    *jsonscan.Doc
	Tokens []uint32       // the prompt's token ids; empty if unknown
	Decode []*worker.Rank // the candidates of the decode leg
}

var (
	// ErrIncompleteHandle reports that prefill answered without a handle that decode can use.
	ErrIncompleteHandle = errors.New("pd: incomplete handle")
	// ErrPrefillFailed reports that the engine failed although it answered 200. The leg ends as one
	// whose engine answered 500.
	ErrPrefillFailed = errors.New("pd: prefill failed")
	// ErrFinal reports that prefill's response is the whole response.
	ErrFinal = errors.New("pd: the prefill answer is final")
)

// checkFinish returns a wrapped ErrPrefillFailed if raw, the finish reason of a prefill response,
// says that the engine gave the request up. vLLM ends requests with "error" and "abort",
// TensorRT-LLM also with "cancelled" and "timeout". No client can cause these. raw is JSON, or nil.
func checkFinish(raw []byte) error {
	switch string(raw) {
	case `"error"`, `"abort"`, `"cancelled"`, `"timeout"`:
		return fmt.Errorf("%w: its finish_reason is %s", ErrPrefillFailed, raw)
	}
	return nil
}

// families lists all families. Add a new family here.
var families = []Family{
	lmcache{},
	nixlPull{},
	nixlPush{},
	sglang{},
	mooncake{},
	orchestrated{},
	storage{},
	trtllm{},
}

// configurableFamily is a Family that depends on the configuration of a model.
type configurableFamily interface {
	// configure returns the Family to use for a model with the given settings.
	configure(pd *config.PD) Family
}

// New returns the Family of a model with the given settings, nil if it has none ("off"). An
// empty name stands for nixl, which it sets.
func New(pd *config.PD) (Family, error) {
	switch pd.Family {
	case "off":
		return nil, nil
	case "":
		pd.Family = "nixl"
	}
	f, err := ByName(pd.Family)
	if err != nil {
		return nil, err
	}
	if c, ok := f.(configurableFamily); ok {
		f = c.configure(pd)
	}
	return f, nil
}

// ByName returns a family by its name in the configuration.
func ByName(name string) (Family, error) {
	for _, f := range families {
		if f.Name() == name {
			return f, nil
		}
	}
	return nil, fmt.Errorf("pd: unknown family %q; want %s", name, strings.Join(Names(), ", "))
}

// Names returns the names of all families, sorted.
func Names() []string {
	var names []string
	for _, f := range families {
		names = append(names, f.Name())
	}
	slices.Sort(names)
	return names
}
