package disagg

import (
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/sidechannel"
	"sluice/router/tokenize"
	"sluice/router/transfers"
	"sluice/router/worker"
)

// request is one client's request under way, pooled. It is not used after the handler has
// returned; what a relayed stream needs then stands in streamEnd.
type request struct {
	scratch
	run
}

// scratch is the memory of a request that the next one uses again.
type scratch struct {
	prompt  tokenize.Prompt
	sized   []schedule.SizedOverlap // overlap per block size of the pool
	approx  kvindex.Overlap
	keys    []blockhash.Seq // of the approximate index
	keyRoom []blockhash.Seq // scratch for the event index
	counted census          // of a small pool
	ahead   uint64          // what was looked at before it was needed

	call *upstream.Call // of the last leg, for the next; nil: somebody else may cut it yet
	left *leaving       // the memory of leaves
	// answers is the memory of untilAnswered; nil until a prefill leg was sent.
	answers *lateAnswer
	// between is the memory of await; nil until a completion was waited for.
	between *between
	rooms   rooms

	excluded   []*worker.Rank // they have failed the request, see exclude
	exclusions []exclusion    // why, one for each of excluded
	passed     []*worker.Rank // passed over by the last choice: excluded, or full
	fields     []upstream.Field
	leg        Leg // what the Family writes
	segments   [][]byte
	answer     []byte // prefill's whole response; pair.Handle borrows from it
	reply      []byte // decode's, where it is held whole
	shaped     []byte // it, as the client gets it, where the family changes it
	ticket     []byte // scratch of pair.Ticket
	learned    []byte // what a Learner found
	vigil      *vigil // over prefill's engine while decode waits for its KV; nil until one was needed
}

// run is all else of it: the next one's begins empty.
type run struct {
	r     *Runner
	x     *front.Exchange
	id    string // X-Request-Id
	model string
	pool  *fleet.Pool
	pd    *config.PD
	plan  Plan

	seen      *fleet.View   // that the plan's candidates are of
	waited    time.Duration // for workers, by retries
	pause     time.Duration // the last, see waitForRank
	warming   bool          // the request is prefill-only
	chosenFor [3]chosenRank // by schedule.Leg

	steering steering
	named    Named      // what headers name, where there is a Namer
	own      fleet.Pool // the pool with what was named in it

	stream    bool
	maxTokens int
	attempt   int    // counts prefill/decode pairs from 1
	free      int    // attempts that do not count, see triesLeft
	plainly   bool   // no more pairs: decode does the whole request
	tries     [3]int // legs sent, by schedule.Leg
	reserved  int    // tokens of the client's key, see reserve
	paid      bool   // what was reserved is settled, or the stream's to settle
	engaged   bool   // a leg was given to an engine
	suspects  int    // engines that broke after this request was sent to them
	unsent    bool   // the last leg failed before its engine saw anything of it

	media      []Medium  // of the prompt, where the caller told them
	waitsSince time.Time // it waited for a worker before it came here; zero: it did not

	tells    bool      // the body asks for token ids in its engine's own words
	output   int       // tokens the caller expects; 0: it did not say
	tuned    *Hints    // of the choice, where the caller tunes it; else nil
	deadline time.Time // the caller's; zero: none
	leavesAt time.Time // when the caller leaves for that; zero: it does not by itself
	shown    bool      // the body holds a handle: one engine may see it

	replyRoom membudget.Lease // of a long reply; see lendReply
	derived   membudget.Count // what was made of the body, and the engines' answers
	texts     found           // see Pair.textOnly
	looked    bool            // movability was
	movable   asked
	unmovable string
	why       string // of this leg

	taking  *taking   // the stream that this request is the rest of; nil: none
	before  int       // attempts of it
	besides int       // tokens that its other choices have told, which are prompts beside its own
	by      time.Time // its end, wherever it runs; zero: none

	salted blockhash.Salt
	asked  []blockhash.Seq // keys or keyRoom: what the event index was asked last

	query    schedule.Query
	pair     Pair // what the Family sees of this attempt
	handleAt time.Time
	leaves   *leaving         // takes the decode leg down when its client leaves; nil: it is cut at once
	holding  bool             // the handle is counted in Runner.pinned
	beside   *beside          // the prefill leg that runs beside decode; nil: none
	lent     *membudget.Lease // pair.Answer, where the stream outlives the request with it; nil: it does not

	wait  *transfers.Wait   // for what is told of the hand-over; nil: nobody would tell
	kept  *sidechannel.Hold // the handle, while no decode engine has seen it; nil: not kept
	given *sidechannel.Hold // the handle, from the head of decode's stream to its first token; nil: not kept
	told  bool              // the decode engine chosen runs the connector

	booked        schedule.Choice // of decode, made before prefill was sent
	fell, fellFor string          // the last kind and detail of fellBack
	planned       string          // X-Sluice-Plan, "" for none
	prefillCached int             // predicted, tokens
	prefilled     bool            // pair.Prefill's work is in the answer
	handed        bool            // the Family wrote the decode leg
	whole         bool            // all of the answer that would be relayed has come, see holdWhole
}

// recycle forgets what borrows from the exchange, keeps bounded scratch.
func (q *request) recycle() {
	const most = 1 << 20
	r := q.r
	if q.x != nil {
		q.x.OnGone(nil) // behind a panic the last leg's cut may be armed yet
		q.pay(0)
	}
	q.hold(false)
	q.unwatch()
	q.abandon()
	q.vigil.forget()
	q.booked.Reservation.Release()
	if q.lent != nil {
		q.lent.Release()
	}
	q.derived.Release()
	if q.replyRoom.Held() > 0 {
		q.reply = nil
		q.replyRoom.Release()
	}
	if cap(q.answer) > most || cap(q.reply) > most || cap(q.shaped) > most || cap(q.leg.room) > most || cap(q.keys) > most/8 || cap(q.keyRoom) > most/8 || cap(q.prompt.Tokens) > most/4 {
		return // let the collector have what one huge prompt needed
	}
	q.scratch.empty()
	q.run = run{}
	r.requests.Put(q)
}

// empty leaves nothing but memory.
func (s *scratch) empty() {
	s.prompt = tokenize.Prompt{Tokens: s.prompt.Tokens[:0]}
	s.sized, s.keys, s.keyRoom = s.sized[:0], s.keys[:0], s.keyRoom[:0]
	clear(s.counted.bases[:cap(s.counted.bases)])
	s.counted = census{sizes: s.counted.sizes[:0], bases: s.counted.bases[:0]}
	if s.left.wasTold() {
		s.call, s.left = nil, nil
	}
	if s.between != nil && len(s.between.gone) > 0 {
		s.between = nil // somebody has left
	}
	if s.answers.wasTold() { // behind a panic
		s.call, s.answers = nil, nil
	}
	s.rooms = s.rooms.again()
	clear(s.excluded[:cap(s.excluded)]) // lets go of ranks that have left
	clear(s.passed[:cap(s.passed)])
	s.excluded, s.exclusions, s.passed = s.excluded[:0], s.exclusions[:0], s.passed[:0]
	clear(s.fields[:cap(s.fields)])
	clear(s.leg.Edits[:cap(s.leg.Edits)])
	clear(s.segments[:cap(s.segments)])
	s.fields, s.segments = s.fields[:0], s.segments[:0]
	s.leg.reset()
	s.answer, s.reply, s.shaped, s.ticket = s.answer[:0], s.reply[:0], s.shaped[:0], s.ticket[:0]
}
