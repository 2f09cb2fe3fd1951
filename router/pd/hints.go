package pd

import (
	"slices"
	"time"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/front"
	"sluice/router/blockhash"
)

// Hints is what a caller may say of a request beside its body and headers, as
// front.Exchange.Attached. The runner reads it and keeps nothing of it.
type Hints struct {
	// Tokens stand for the prompt where ranks' caches are looked up, in place of
	// the body's: of a prompt with media, the ids that its blocks are known by.
	Tokens []uint32
	// Media are the images and the like of the prompt, in order of their place.
	Media []Medium
	// Output is how many tokens the caller expects; 0: it did not say. It counts
	// for the choice only, never as a limit.
	ExpectedOutput int
	// Handed: the caller has run prefill itself, and the body holds what decode
	// needs of it. The request is decoded on one rank, and never shown to a second
	// engine once a first has seen it.
	HasHandle bool
	// ReturnsTokenIDs: the body has its engine tell token ids by another member than
	// return_token_ids.
	ReturnsTokenIDs bool
	// Deadline ends the request wherever it is: the caller is told that its time is over,
	// and the legs end as those of one who leaves. Zero: the time-outs configured alone count.
	Deadline time.Time
	// Leaves is when the caller leaves by itself because its time is over: what ends for
	// that is called by its name. Zero where there is a Deadline, or none.
	DisconnectsAt time.Time
	// WaitingSince says since when the request has waited for a worker, where it has before it
	// came here: it waits no longer for that. Zero: it has not.
	WaitingSince time.Time
	// OverlapWeight and Temperature take the place of the configured ones for this
	// request; nil leaves them.
	OverlapWeight, Temperature *float64
	// Fields says by which field the caller has said what a header of steering says,
	// for errors; nil or without the header: by the header.
	FieldNames map[string]string
}

// Medium is one image (or the like) in a prompt: the blocks that hold a part of
// it hold its identity in their hash.
type Medium struct {
	// Key is the identity as it stands in an engine's events; Numbered says that
	// it is a hash of the caller's making, which no event carries: such blocks are
	// known by the router's own choices alone.
	Key      string
	Hash     uint64
	HashOnly bool
	// From and To are the tokens [From, To) that it takes in the prompt.
	From, To int
}

// applyHints reads the hints.
func (q *request) applyHints() {
	h, ok := q.x.Attached.(*Hints)
	if !ok {
		return
	}
	q.media, q.expectedOutput, q.hasHandle, q.deadline, q.disconnectsAt, q.returnsTokenIDs = h.Media, h.ExpectedOutput, h.HasHandle, h.Deadline, h.DisconnectsAt, h.ReturnsTokenIDs
	q.x.FailAt(q.deadline, front.Deadline, "the request's time is over")
	q.waitingSince = h.WaitingSince
	if h.OverlapWeight != nil || h.Temperature != nil {
		q.tuning = h
	}
}

// earlierDeadline is end, or the caller's deadline where that is sooner.
func (q *request) earlierDeadline(end time.Time) time.Time {
	if !q.deadline.IsZero() && q.deadline.Before(end) {
		return q.deadline
	}
	return end
}

// pastDeadline says whether the caller's deadline is over: what fails then fails for want
// of time, and says nothing of an engine.
func (q *request) pastDeadline() bool {
	by := q.deadline
	if by.IsZero() {
		by = q.disconnectsAt
	}
	return !by.IsZero() && !time.Now().Before(by)
}

// abortReason is what the leg of a caller who has left ends with.
func (q *request) abortReason() string {
	if q.pastDeadline() {
		return string(front.Deadline)
	}
	return string(front.ClientGone)
}

// applyHintedTokens puts the ids that the caller gave for the look-up in the place of
// the prompt's.
func (q *request) applyHintedTokens() {
	if h, ok := q.x.Attached.(*Hints); ok && len(h.Tokens) > 0 {
		q.prompt.Tokens = append(q.prompt.Tokens[:0], h.Tokens...)
		q.prompt.Count = len(q.prompt.Tokens)
	}
}

// planPrefilled makes the plan of a request whose prefill the caller has run: decode on
// one rank.
func (q *request) planPrefilled() {
	if q.hasHandle && q.plan.Family != nil {
		q.plan.Whole, q.plan.Family = q.plan.Decode, nil
	}
}

// blockSeqs appends the hashes of the prompt's blocks.
func (q *request) blockSeqs(dst []blockhash.Seq, salt blockhash.Salt, size int) []blockhash.Seq {
	if len(q.media) == 0 {
		return blockhash.Seqs(dst, salt, q.prompt.Tokens, size)
	}
	return seqsWithMedia(dst, salt, q.prompt.Tokens, size, q.media)
}

// seqsWithMedia is blockhash.Seqs for a prompt with media: each block that a
// medium overlaps is tagged with it and with where it begins, counted from the
// block, as vLLM does from 0.19 on (kv_events.py, extra_keys: [identifier,
// offset]). media are in the order of their From.
func seqsWithMedia(dst []blockhash.Seq, salt blockhash.Salt, tokens []uint32, size int, media []Medium) []blockhash.Seq {
	if size <= 0 {
		return dst
	}
	var tag []byte
	h := blockhash.Seq(salt)
	locals := blockhash.Locals(nil, tokens, size)
	for i, l := range locals {
		from, to := i*size, (i+1)*size
		for len(media) > 0 && media[0].To <= from {
			media = media[1:]
		}
		for j := 0; j < len(media) && media[j].From < to; j++ {
			m := &media[j]
			if m.To <= from {
				continue
			}
			tag = m.appendTag(tag[:0], m.From-from)
			l = blockhash.Tagged(l, tag)
		}
		h = blockhash.Next(h, l)
		dst = append(dst, h)
	}
	return dst
}

// appendTag appends the medium's identity as it stands in events: msgpack of
// [identifier, offset].
func (m *Medium) appendTag(dst []byte, offset int) []byte {
	dst = msgp.AppendArrayHeader(dst, 2)
	if m.HashOnly {
		dst = msgp.AppendUint64(dst, m.Hash)
	} else {
		dst = msgp.AppendString(dst, m.Key)
	}
	if offset < 0 {
		return msgp.AppendInt(dst, offset)
	}
	return msgp.AppendUint64(dst, uint64(offset)) // the short forms that engines write
}

// AddWaiter counts in a caller who waits for a worker before there is a request, among those
// that wait here; leave ends that. ok is false where PoolWaiters wait already.
func (r *Runner) AddWaiter() (remove func(), ok bool) {
	remove = func() { r.waiting.Add(-1) }
	if n, maxWaiters := r.waiting.Add(1), r.options().PoolWaiters; maxWaiters > 0 && n > int64(maxWaiters) {
		remove()
		return nil, false
	}
	return remove, true
}

// HandsOver says whether requests of a kind can be handed over between the workers of
// a model; true where there is no hand-over.
func (r *Runner) HandsOver(model string, kind front.Kind) bool {
	m := r.current.Load().pdOf(model)
	return m.family == nil || m.traits.Kinds.Has(kind)
}

// VersionAtLeast says whether an engine's version is major.minor.patch or later; not for
// one that is not known.
func VersionAtLeast(version string, major, minor, patch int) bool {
	parsed := parseVersion(version)
	return slices.Compare(parsed[:], []int{major, minor, patch}) >= 0
}
