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

// Family is the hand-over of one engine family: what is particular to it, in
// small pure functions, one file each. The runner chooses the ranks, sends the
// legs in the Order the family says, and decides what each failure means from
// its Traits.
//
// The functions run on the request path: they neither block nor keep what they
// are given, and what they write goes into the Leg's own room. A Family is a
// value without state, shared by all requests.
//
// A family that needs more says so by further methods: Asker and Learner (facts
// of a prefill worker, from beside its API or from its handles), Awaiter (a completion told from outside
// between the legs), Trier (decode may decline for lack of cached blocks),
// Answerer, Finisher and Joiner (answers that are not what the client is to see), Picky
// (requests that it cannot hand over).
type Family interface {
	// Name as it stands in config and in explain records.
	Name() string
	Traits() Traits
	// Order of the legs between p.Prefill and (where chosen) p.Decode.
	Order(p *Handover) Order
	// Prefill writes the prefill leg. p.Decode is set when the Order is
	// Concurrent or the Traits say NamesDecode.
	Prefill(leg *LegRequest, p *Handover)
	// Handle finds in a prefill's 200 answer what decode must be given; not
	// called for Concurrent pairs. It fails with ErrIncompleteHandle (wrapped)
	// when there is none that a decode engine could use: the request is then
	// decoded plainly. It fails with ErrFinal when the answer is the whole
	// answer and no decode is needed: the client gets it (see Answerer). The
	// result borrows from body.
	Handle(p *Handover, body []byte) (handle []byte, err error)
	// Decode writes the decode leg: with p.Handle after prefill, without one
	// for Concurrent pairs.
	Decode(leg *LegRequest, p *Handover)
}

// Order says when the legs of a pair run.
type Order uint8

// The orders.
const (
	// PrefillFirst: prefill, its handle into decode.
	PrefillFirst Order = iota
	// Concurrent: both at once, joined by values known beforehand (Pair.Token,
	// a bootstrap room or transfer id). When one fails the other is cut at
	// once; a retry takes new ranks and a new Token.
	Concurrent
	// DecodeFirst: decode is tried; when it declines (Trier), prefill and then
	// decode again.
	DecodeFirst
)

// Traits are what the runner must know of a family.
type Traits struct {
	// Kinds of request that can be handed over; others run on one rank, or are
	// refused where NoPlainDecode.
	Kinds Kinds
	// Several: one hand-over serves several prompts and choices. Without it
	// such requests are decoded plainly.
	Batches bool
	// NoPlainDecode: a decode engine of this family cannot prefill, so there is no
	// plain decode, and no conditional one.
	NoPlainDecode bool
	// NamesDecode: the prefill leg names the decode rank, which is then chosen
	// before prefill is sent.
	NamesDecode bool
	// PrefillNeedsDecode: a prefill worker takes no prompt without being told of the
	// decode worker that will fetch it, so there are no prefill-only requests.
	PrefillNeedsDecode bool
	// Unleased: a handle pins nothing on the prefill worker. Otherwise decode
	// is sent within PD.Lease of prefill's answer or prefill runs again, a
	// handle is given to one engine only, and a decode of a client that left is
	// cut only when it was admitted.
	NoLease bool
	// Keyed: in a Concurrent pair decode asks prefill for blocks by an id, and for one
	// that is gone it gets none, so a second decode may ask to have them freed.
	Refetchable bool
	// JoinsByRequestID: both engines find the hand-over by the legs' X-Request-Id alone, so an id
	// that another request has, or had a moment ago, must not come twice.
	JoinsByRequestID bool
	// OldJoinsByRequestID: the same of engines before vLLM 0.14, and of later ones that are told so,
	// which add nothing of their own to the id: prefill frees or gives the blocks of whichever request had it last.
	OldJoinsByRequestID bool
	// Told: engines of this family may run Sluice's connector, so that each
	// hand-over can be watched (Options.Transfers).
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

// Has says whether k is in the set.
func (s Kinds) Has(k front.Kind) bool { return s>>k&1 != 0 }

// PeerInfoFetcher is a Family that needs to know a fact of a prefill rank that its API
// does not tell, such as an engine's id at its bootstrap server. The runner
// asks once, keeps the answer per rank until a pair with it fails or the worker
// leaves, and puts it in Pair.Fact.
type PeerInfoFetcher interface {
	// Ask gives where to ask for the rank's fact by GET, base "" when there is
	// nothing to ask. It is called when the fact is not known, not per request.
	PeerInfoURL(p *Handover) (base, path string)
	// Fact reads a 200 answer.
	ParsePeerInfo(p *Handover, body []byte) (string, error)
}

// PeerInfoLearner is a Family that learns a fact of a prefill rank from its handles. The
// runner keeps it as it keeps an Asker's.
type PeerInfoLearner interface {
	// Learn appends the fact that p.Handle tells of p.Prefill; nothing: it tells none.
	LearnPeerInfo(dst []byte, p *Handover) []byte
}

// CompletionWaiter is a Family whose decode must wait for a completion told from outside
// (Options.Completions) beside prefill's answer.
type CompletionWaiter interface {
	// Expects gives the id that the completions carry and how many will come;
	// 0: none. It is called before the prefill leg is sent.
	ExpectedCompletions(p *Handover) (id string, count int)
}

// TrialFamily is a Family with the order DecodeFirst.
type TrialFamily interface {
	// Declined says whether decode's answer, or as much of a stream as has
	// come (more: undecided, wait for more), is a refusal for lack of cached
	// blocks.
	Declined(answer []byte) (declined, more bool)
}

// AnswerRewriter is a Family whose decode answers the client may not see as they are:
// they have another shape, lack something, or hold members that are no client's business.
type AnswerRewriter interface {
	// Body appends what the client gets in place of a whole 200 answer.
	Body(dst []byte, p *Handover, body []byte) []byte
	// Events rewrites a stream; nil passes it as it comes. The Rewriter must
	// not keep p or anything borrowed from it, but a Joiner's p.Answer.
	Events(p *Handover) relay.Rewriter
}

// FinalAnswerer is an Answerer whose prefill answer may be the whole answer (ErrFinal).
type FinalAnswerer interface {
	AnswerRewriter
	// Final appends what a streaming client gets in place of it: events, the last one
	// included.
	Final(dst []byte, p *Handover, body []byte) []byte
}

// AnswerMerger is an Answerer of some requests only: those of whose answer decode has one part
// and prefill another.
type AnswerMerger interface {
	AnswerRewriter
	// Joins says whether this is one of them. The runner then waits for prefill's answer,
	// in whatever order the legs run, before anything goes to the client, and has it in
	// Pair.Answer, for as long as a stream lasts.
	MergesAnswers(p *Handover) bool
}

var (
	// ErrIncompleteHandle: prefill answered without a handle that decode can use.
	ErrIncompleteHandle = errors.New("disagg: incomplete handle")
	// ErrFinal: prefill's answer is the whole answer.
	ErrFinal = errors.New("disagg: the prefill answer is final")
)

// families is the one place a family is added.
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
	// configure gives the Family to use in its place.
	configure(pd *config.PD) Family
}

// FamilyByName gives a family by its name in config.
func FamilyByName(name string) (Family, error) {
	for _, f := range families {
		if f.Name() == name {
			return f, nil
		}
	}
	return nil, fmt.Errorf("disagg: unknown family %q; want %s", name, strings.Join(FamilyNames(), ", "))
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
