package schedule

import (
	"encoding/json"
	"fmt"
	"time"

	"sluice/router/worker"
)

// Record is the explain record of one request, as Explain and Recent return it.
type Record struct {
	RequestID string          `json:"request_id"`
	Started   time.Time       `json:"started"`
	Policy    string          `json:"policy"`
	Decisions []Decision      `json:"decisions"`
	Dropped   int             `json:"decisions_dropped,omitempty"`
	Joint     []JointDecision `json:"joint_decisions,omitempty"` // joint choices of both legs
	Notes     []Note          `json:"notes,omitempty"`
	LostNotes int             `json:"notes_dropped,omitempty"`
	Outcome   *OutcomeRecord  `json:"outcome"` // null while the request runs
	// Earlier are older requests with the same id, newest first.
	Earlier []Record `json:"earlier,omitempty"`
}

// Decision is one choice of a rank for a leg.
type Decision struct {
	AtMS         float64 `json:"at_ms"` // since the start of the record
	Leg          string  `json:"leg"`
	Attempt      int     `json:"attempt"`
	Chosen       string  `json:"chosen"` // worker/rank, "" if there was none
	PromptTokens int     `json:"prompt_tokens"`
	PromptSource string  `json:"prompt_source"` // of the prompt's token ids, as in sluice_prompts_total
	OutputTokens int     `json:"output_tokens_assumed"`
	Candidates   int     `json:"candidates"` // number of candidates
	Excluded     int     `json:"excluded"`
	LostRaces    int     `json:"lost_races,omitempty"`
	// Session names the request's session as /admin/v1/sessions does. AtSession: the session's rank
	// was chosen over one of the same quality and a lower cost.
	Session   string      `json:"session,omitempty"`
	AtSession bool        `json:"at_session,omitempty"`
	Shown     []Candidate `json:"shown"` // all, or the best of many
}

// Candidate is one rank as the choice saw it, with the terms of its cost.
type Candidate struct {
	Rank          string  `json:"rank"`
	Chosen        bool    `json:"chosen,omitempty"`
	Excluded      bool    `json:"excluded,omitempty"`
	Cost          float64 `json:"cost_ms"`
	Terms         Terms   `json:"terms_ms"`
	Cached        int     `json:"cached_tokens"`
	Overlap       int     `json:"overlap_blocks"`
	Host          int     `json:"overlap_host_blocks,omitempty"` // of overlap_blocks, not on the device
	Disk          int     `json:"overlap_disk_blocks,omitempty"` // of overlap_blocks, on disk only
	Credit        float64 `json:"overlap_credit_tokens"`         // what the overlap saves, weighted
	Approx        bool    `json:"overlap_approximate,omitempty"` // predicted from the router's own choices
	InFlight      bool    `json:"overlap_in_flight,omitempty"`   // just sent there; no event yet
	Unknown       bool    `json:"overlap_unknown,omitempty"`     // no trustworthy feed and no prediction
	Rates         Rates   `json:"rates_ms"`                      // per unit, as used for the cost
	Reserved      int64   `json:"prefill_tokens_reserved"`       // those expected to be uncomputed still
	Blocks        int     `json:"decode_blocks_reserved"`
	Requests      int     `json:"requests"`
	Work          int64   `json:"decode_block_steps_reserved"`   // for each of those blocks the steps that its request is expected to run
	Waiting       int     `json:"engine_waiting"`                // -1: never reported
	OtherTokens   int64   `json:"others_tokens_waiting"`         // of requests that this router did not place: reported by the engine, or assumed
	LackingTokens int     `json:"tokens_without_room,omitempty"` // of this request
	Evicted       int     `json:"tokens_displaced,omitempty"`    // cached tokens of other prompts that its new blocks displace
	Feed          string  `json:"feed"`
}

// Note is a line of text in a record.
type Note struct {
	AtMS float64 `json:"at_ms"`
	Text string  `json:"text"`
}

// OutcomeRecord is the JSON form of an Outcome.
type OutcomeRecord struct {
	Status       int     `json:"status"`
	Reason       string  `json:"reason,omitempty"`
	CachedTokens int     `json:"cached_tokens"` // -1 unknown
	PromptTokens int     `json:"prompt_tokens"`
	OutputTokens int     `json:"output_tokens"`
	TTFTMS       float64 `json:"ttft_ms,omitempty"`
	TotalMS      float64 `json:"total_ms"`

	Transfer *TransferRecord `json:"transfer,omitempty"` // of the last hand-over, if it was observed
}

// TransferRecord is the JSON form of a Transfer.
type TransferRecord struct {
	State   string  `json:"state"`
	Bytes   int64   `json:"bytes"`
	TookMS  float64 `json:"took_ms"`  // as measured by the engine
	AfterMS float64 `json:"after_ms"` // from prefill's response to the report
}

// Explain returns the record of a request as JSON (a Record). ok is false if it is not among the
// last N.
func (s *Scheduler) Explain(requestID string) (body []byte, ok bool) {
	if s.records == nil {
		return nil, false
	}
	recs := s.records.findAll(s, clipID(requestID))
	if len(recs) == 0 {
		return nil, false
	}
	recs[0].Earlier = recs[1:]
	body, err := json.Marshal(&recs[0])
	return body, err == nil
}

// RecordCapacity returns the largest number of records; 0: none are kept.
func (s *Scheduler) RecordCapacity() int {
	if s.records == nil {
		return 0
	}
	return len(s.records.slots)
}

// Policy returns the name of the current policy.
func (s *Scheduler) Policy() string { return policyNames[s.currentSettings().policy] }

// Recent returns the newest records, newest first, at most limit.
func (s *Scheduler) Recent(limit int) []Record { return s.newest(limit, wholeRecord, false) }

// Summaries is Recent for a list of requests: of the candidates of a decision, the records have only the
// chosen one, without its cost. With running, requests that have ended are left out; limit bounds the
// records that are searched.
func (s *Scheduler) Summaries(limit int, running bool) []Record {
	return s.newest(limit, chosenOnly, running)
}

// exportDetail is how much of a record is exported. With many ranks most of a record is its candidates.
type exportDetail bool

const (
	wholeRecord exportDetail = false
	chosenOnly  exportDetail = true
)

// newest returns the newest records, newest first, of at most limit that it looks at.
func (s *Scheduler) newest(limit int, detail exportDetail, running bool) []Record {
	b := s.records
	if b == nil || limit <= 0 {
		return nil
	}
	limit = min(limit, len(b.slots))
	recs := make([]Record, 0, min(limit, 64))
	newest := b.next.Load()
	for seq := newest; seq > 0 && newest-seq < uint64(limit); seq-- {
		r := &b.slots[(seq-1)%uint64(len(b.slots))]
		r.mu.Lock()
		if r.used && r.seq == seq && !(running && r.ended) {
			recs = append(recs, r.export(s, detail))
		}
		r.mu.Unlock()
	}
	return recs
}

// findAll finds every record of an id, newest first. It scans the ring only if the id is known.
func (b *recordRing) findAll(s *Scheduler, id string) []Record {
	h := hashID(id)
	if _, ok := b.find(h); !ok {
		return nil
	}
	var recs []Record
	newest := b.next.Load()
	for seq := newest; seq > 0 && newest-seq < uint64(len(b.slots)); seq-- {
		r := &b.slots[(seq-1)%uint64(len(b.slots))]
		r.mu.Lock()
		if r.used && r.hash == h && string(r.id()) == id {
			recs = append(recs, r.export(s, wholeRecord))
		}
		r.mu.Unlock()
	}
	return recs
}

// export copies the record. The caller holds its mutex.
func (r *record) export(s *Scheduler, detail exportDetail) Record {
	rec := Record{RequestID: string(r.id()), Started: s.clock.At(time.Duration(r.started)), Policy: s.Policy(), Dropped: int(r.droppedDecisions),
		Decisions: make([]Decision, 0, r.decisions)}
	var d decision
	var terms []candidateState
	for rest := r.encodedDecisions(); len(rest) > 0; {
		d, terms, rest = decodeDecision(rest, terms, s.records.ranks)
		rec.Decisions = append(rec.Decisions, d.export(s, terms, detail))
	}
	var transfer Transfer
	if a := r.extra; a != nil {
		for i := range a.joint {
			rec.Joint = append(rec.Joint, a.joint[i].export(&s.currentSettings().weights))
		}
		for _, n := range a.notes {
			rec.Notes = append(rec.Notes, Note{AtMS: ms(n.at), Text: n.text})
		}
		rec.LostNotes, transfer = a.lostNotes, a.transfer
	}
	if r.ended {
		o := &r.outcome
		rec.Outcome = &OutcomeRecord{Status: int(o.status), Reason: o.reason, CachedTokens: int(o.cached),
			PromptTokens: int(o.prompt), OutputTokens: int(o.output), TTFTMS: ms(o.ttft), TotalMS: ms(o.total)}
		if t := &transfer; t.State != "" {
			rec.Outcome.Transfer = &TransferRecord{State: t.State, Bytes: t.Bytes, TookMS: ms(t.Duration), AfterMS: ms(t.Delay)}
		}
	}
	return rec
}

func (d *decision) export(s *Scheduler, terms []candidateState, detail exportDetail) Decision {
	out := Decision{AtMS: ms(d.at), Leg: d.leg.String(), Attempt: int(d.attempt), PromptTokens: int(d.prompt), PromptSource: d.source.String(), OutputTokens: int(d.output),
		Candidates: int(d.candidates), Excluded: int(d.excluded), LostRaces: int(d.races), AtSession: d.atSession}
	if detail == chosenOnly {
		if i := int(d.chosen); i >= 0 && i < len(terms) {
			out.Chosen = terms[i].rank.ID.String()
			out.Shown = []Candidate{{Rank: out.Chosen, Chosen: true, Cached: int(terms[i].cached)}}
		}
		return out
	}
	out.Shown = make([]Candidate, 0, len(terms))
	if d.session != 0 {
		out.Session = fmt.Sprintf("%08x", d.session)
	}
	for i := range terms {
		t := &terms[i]
		terms := s.currentSettings().weights.termsOf(d.leg, int(d.prompt), t)
		if terms.Others > 0 { // by the load at the choice, which only the cost knows
			terms.Others = max(0, t.cost-terms.own()-terms.Eviction)
		}
		c := Candidate{Rank: t.rank.ID.String(), Chosen: i == int(d.chosen), Excluded: t.excluded, Cost: t.cost,
			Terms: terms, Cached: int(t.cached), Overlap: int(t.depth), Approx: t.approx,
			Host: int(t.host), Disk: int(t.disk), Credit: round3(t.credit), InFlight: t.inFlight, Unknown: t.unknown(), Rates: t.rates(),
			Reserved: t.queued, Blocks: int(t.blocks), Requests: int(t.requests), Waiting: int(t.waiting), OtherTokens: t.otherTokens, Work: t.work, LackingTokens: int(t.lackingTokens), Evicted: int(t.evicted), Feed: t.feed.String()}
		if c.Chosen {
			out.Chosen = c.Rank
		}
		out.Shown = append(out.Shown, c)
	}
	return out
}

func ms(d time.Duration) float64 { return round3(float64(d) / float64(time.Millisecond)) }

func round3(v float64) float64 { return float64(int64(v*1000+0.5)) / 1000 }

// unknown reports whether the rank's blocks are unknown: its cost is then that of a rank without
// any, which is not the same as knowing that it has none. A feed that is syncing is incomplete.
func (t *candidateState) unknown() bool {
	return t.feed != worker.FeedLive && t.cached == 0
}

func (t *candidateState) rates() Rates {
	ms := func(w worker.Work) float64 { return float64(t.price[w]) / nsPerMS }
	return Rates{Prefill: ms(worker.Prefilling), Transfer: ms(worker.Pulling), Block: ms(worker.Decoding)}
}
