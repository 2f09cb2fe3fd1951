package pd

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/router/config"
)

// Family is the hand-over of one engine family: what is particular to it, as small
// functions in a file of its own. The runner chooses the ranks, sends the legs in the
// family's Order, and decides what each failure means from the family's Traits.
//
// The functions run on the request path. They do not block, they keep no argument, and
// they write into the buffers of the LegRequest. A Family is a value without state that
// all requests share.
//
// A Family may implement further interfaces: PeerInfoFetcher and PeerInfoLearner (facts of
// a prefill rank), CompletionWaiter (decode waits for a completion from outside),
// TrialFamily (decode may decline for lack of cached blocks), AnswerRewriter, FinalAnswerer
// and AnswerMerger (answers that the client does not get as they are), and RequestFilter
// (requests that the family cannot hand over).
type Family interface {
	// Name is the family's name in the configuration and in explain records.
	Name() string
	Traits() Traits
	// Order is the order of the legs between h.Prefill and h.Decode, if that is chosen.
	Order(h *Handover) Order
	// Prefill writes the prefill leg. h.Decode is set when the Order is Concurrent or the
	// Traits have NamesDecode.
	Prefill(leg *LegRequest, h *Handover)
	// Handle finds the handle for decode in a prefill's 200 answer. The runner does not call
	// it for Concurrent pairs, except to check facts (PeerInfoLearner). It returns a wrapped
	// ErrIncompleteHandle when the answer has no handle that a decode engine could use; the
	// request is then decoded without a hand-over. It returns ErrFinal when the answer is
	// the whole answer, which the client gets (see AnswerRewriter). The result borrows from
	// body.
	Handle(h *Handover, body []byte) (handle []byte, err error)
	// Decode writes the decode leg: with h.Handle after prefill, without one for Concurrent
	// pairs.
	Decode(leg *LegRequest, h *Handover)
}

// Order says when the legs of a pair run.
type Order uint8

// The orders.
const (
	// PrefillFirst runs prefill, and decode with its handle.
	PrefillFirst Order = iota
	// Concurrent runs both at once. They find each other by values known beforehand
	// (Handover.Token, as a bootstrap room or transfer id). When one leg fails the runner
	// cancels the other; a retry has new ranks and a new Token.
	Concurrent
	// DecodeFirst tries decode, and runs prefill and decode again when decode declines
	// (TrialFamily).
	DecodeFirst
)

// Traits are what the runner must know of a family.
type Traits struct {
	// Kinds are the requests that can be handed over. Others run on one rank, or are refused
	// where NoPlainDecode is set.
	Kinds Kinds
	// Batches: one hand-over serves several prompts and choices. Without it the runner
	// decodes such requests without a hand-over.
	Batches bool
	// NoPlainDecode: a decode engine of this family cannot prefill, so neither a fall-back to
	// decode alone nor conditional disaggregation is possible.
	NoPlainDecode bool
	// NamesDecode: the prefill leg names the decode rank, so the runner chooses that rank
	// before it sends prefill.
	NamesDecode bool
	// PrefillNeedsDecode: a prefill engine accepts no prompt without the decode engine that
	// will fetch it, so there are no prefill-only requests.
	PrefillNeedsDecode bool
	// NoLease: a handle pins nothing on the prefill engine. Without it the runner sends decode
	// within PD.Lease of prefill's answer or runs prefill again, gives a handle to one engine
	// only, and follows the leased rows of abortRules when the client disconnects.
	NoLease bool
	// Refetchable: in a Concurrent pair decode asks prefill for blocks by an id, and gets none
	// for an id that is gone, so a second decode may ask in order to have them freed.
	Refetchable bool
	// JoinsByRequestID: both engines find the hand-over by the legs' X-Request-Id alone, so no
	// two requests may have the same id, at once or one soon after the other.
	JoinsByRequestID bool
	// OldJoinsByRequestID: the same for engines before vLLM 0.14, and for later ones that are
	// started without random suffixes of ids. Prefill frees, or gives away, the blocks of the
	// request that had the id last.
	OldJoinsByRequestID bool
	// Reports: engines of this family may run Sluice's connector, which reports each transfer
	// (Options.Transfers).
	Reports bool
}

// Kinds is a set of front.Kind.
type Kinds uint16

// kindsOf makes a set.
func kindsOf(kinds ...front.Kind) (set Kinds) {
	for _, k := range kinds {
		set |= 1 << k
	}
	return set
}

// Has reports whether k is in the set.
func (s Kinds) Has(k front.Kind) bool { return s>>k&1 != 0 }

// PeerInfoFetcher is a Family that needs a fact of a prefill rank that the rank's API does
// not have, such as an engine's id at its bootstrap server. The runner fetches it once per
// rank, keeps it until a pair with it fails or the worker leaves, and sets
// Handover.PeerInfo.
type PeerInfoFetcher interface {
	// PeerInfoURL is where to GET the fact; base is "" when there is nothing to fetch. The
	// runner calls it when it does not have the fact, not for each request.
	PeerInfoURL(h *Handover) (base, path string)
	// ParsePeerInfo reads a 200 answer.
	ParsePeerInfo(h *Handover, body []byte) (string, error)
}

// PeerInfoLearner is a Family that learns a fact of a prefill rank from its handles. The
// runner keeps it as it keeps that of a PeerInfoFetcher.
type PeerInfoLearner interface {
	// LearnPeerInfo appends the fact that h.Handle contains about h.Prefill, if any.
	LearnPeerInfo(dst []byte, h *Handover) []byte
}

// CompletionWaiter is a Family whose decode must wait for completions from outside
// (Options.Completions) in addition to prefill's answer.
type CompletionWaiter interface {
	// ExpectedCompletions is the id that the completions carry and their number, 0 for none.
	// The runner calls it before it sends the prefill leg.
	ExpectedCompletions(h *Handover) (id string, count int)
}

// TrialFamily is a Family with the order DecodeFirst.
type TrialFamily interface {
	// Declined reports whether decode refuses for lack of cached blocks. answer is its whole
	// answer or the beginning of a stream; more asks for more of an undecided stream.
	Declined(answer []byte) (declined, more bool)
}

// AnswerRewriter is a Family whose decode answers do not go to the client as they are: they
// have another shape, lack something, or have members that clients must not see.
type AnswerRewriter interface {
	// Body appends what the client gets instead of a whole 200 answer.
	Body(dst []byte, h *Handover, body []byte) []byte
	// Events rewrites a stream; nil leaves it unchanged. The Rewriter must not keep h or
	// what it borrows from h, except h.Answer for an AnswerMerger.
	Events(h *Handover) relay.Rewriter
}

// FinalAnswerer is an AnswerRewriter whose prefill answer may be the whole answer (ErrFinal).
type FinalAnswerer interface {
	AnswerRewriter
	// Final appends what a streaming client gets instead: all events with the last one.
	Final(dst []byte, h *Handover, body []byte) []byte
}

// AnswerMerger is an AnswerRewriter for those requests of whose answer decode has one part
// and prefill the other.
type AnswerMerger interface {
	AnswerRewriter
	// MergesAnswers reports whether this is such a request. The runner then waits for
	// prefill's answer, in whatever order the legs run, before anything goes to the client.
	// Handover.Answer has it for as long as a stream lasts.
	MergesAnswers(h *Handover) bool
}

var (
	// ErrIncompleteHandle: prefill answered without a handle that decode can use.
	ErrIncompleteHandle = errors.New("pd: incomplete handle")
	// ErrFinal: prefill's answer is the whole answer.
	ErrFinal = errors.New("pd: the prefill answer is final")
)

// families lists all families. A new one is added here.
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

// configurableFamily is a Family that depends on the configuration of its models.
type configurableFamily interface {
	// configure returns the Family to use for a model with these settings.
	configure(pd *config.PD) Family
}

// FamilyByName returns a family by its name in the configuration.
func FamilyByName(name string) (Family, error) {
	for _, f := range families {
		if f.Name() == name {
			return f, nil
		}
	}
	return nil, fmt.Errorf("pd: unknown family %q; want %s", name, strings.Join(FamilyNames(), ", "))
}

// FamilyNames lists the families, sorted.
func FamilyNames() []string {
	var names []string
	for _, f := range families {
		names = append(names, f.Name())
	}
	slices.Sort(names)
	return names
}
