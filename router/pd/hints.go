package pd

import (
	"time"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/front"
	"sluice/router/blockhash"
	"sluice/router/tokenize/incremental"
)

// Hints carries what an in-process caller knows about a request beyond its body and headers. The
// caller sets it as front.Exchange.Attached. The runner reads it and retains nothing.
type Hints struct {
	// Tokens replace the body's token ids in lookups of the ranks' caches. For a prompt with media
	// they are the ids from which the engine computes its block hashes.
	Tokens []uint32
	// Media are the images and other media of the prompt, in order of position.
	Media []Medium
	// ExpectedOutput is the number of output tokens that the caller expects, 0 if unknown. It
	// affects only the choice of a rank and is not a limit.
	ExpectedOutput int
	// HasHandle says that the caller has run prefill and the body holds the KV handle. The router
	// decodes the request on one rank and sends it to no second engine after one engine has
	// received it.
	HasHandle bool
	// ReturnsTokenIDs says that the body makes its engine return token ids by a member other than
	// return_token_ids.
	ReturnsTokenIDs bool
	// Deadline ends the request in any phase: the caller gets a deadline error, and the legs end as
	// they do when a client disconnects. If it is zero, only the configured timeouts apply.
	Deadline time.Time
	// DisconnectsAt is when the caller disconnects because its own deadline has passed. A request
	// that ends for this reason is reported as past its deadline. It is zero if Deadline is set or
	// the caller has no deadline.
	DisconnectsAt time.Time
	// WaitingSince is when the caller began to wait for a worker before it made this request. That
	// time counts toward the pool wait. It is zero if the caller did not wait.
	WaitingSince time.Time
	// OverlapWeight and Temperature override the configured values for this request if they are not
	// nil.
	OverlapWeight, Temperature *float64
	// FieldNames maps a steering header to the caller's own field with the same meaning, so that
	// errors name that field. Errors name a header that has no entry by the header itself.
	FieldNames map[string]string
}

// Medium is one image or other medium in a prompt. The hash of every block that it overlaps
// includes its identity.
type Medium struct {
	// Key is the identity as it appears in an engine's events. With HashOnly the identity is Hash
	// instead, which the caller computed and no event carries; the router then knows such blocks
	// only from its own choices.
	Key      string
	Hash     uint64
	HashOnly bool
	// The medium covers the prompt tokens [From, To).
	From, To int
}

// applyHints copies the hints into the request.
func (q *request) applyHints() {
	h, ok := q.req.Attached.(*Hints)
	if !ok {
		return
	}
	q.media, q.expectedOutput, q.hasHandle, q.deadline, q.disconnectsAt, q.returnsTokenIDs = h.Media, h.ExpectedOutput, h.HasHandle, h.Deadline, h.DisconnectsAt, h.ReturnsTokenIDs
	if !q.deadline.IsZero() {
		q.deadlineFrom = "context.timeout_ms"
		q.x.FailAt(q.deadline, front.Deadline, q.timeOver())
	}
	q.waitingSince = h.WaitingSince
	if h.OverlapWeight != nil || h.Temperature != nil {
		q.tuning = h
	}
}

// earlierDeadline returns the earlier of end and the caller's deadline.
func (q *request) earlierDeadline(end time.Time) time.Time {
	if !q.deadline.IsZero() && q.deadline.Before(end) {
		return q.deadline
	}
	return end
}

// pastDeadline reports whether the caller's deadline has passed. A failure after it is due to the
// deadline and says nothing about the engine.
func (q *request) pastDeadline() bool {
	by := q.deadline
	if by.IsZero() {
		by = q.disconnectsAt
	}
	return !by.IsZero() && !time.Now().Before(by)
}

// abortReason returns the reason with which a leg ends after its caller has disconnected.
func (q *request) abortReason() string {
	if q.pastDeadline() {
		return string(front.Deadline)
	}
	return string(front.ClientGone)
}

// applyHintedTokens replaces the prompt's token ids with those that the caller set for cache
// lookups.
func (q *request) applyHintedTokens() {
	if h, ok := q.req.Attached.(*Hints); ok && len(h.Tokens) > 0 {
		q.prompt.Tokens, q.prompt.Blocks = append(q.prompt.Tokens[:0], h.Tokens...), q.prompt.Blocks[:0]
		q.prompt.Count = len(q.prompt.Tokens)
	}
}

// planPrefilled plans a request whose prefill the caller has already run: one rank decodes it.
func (q *request) planPrefilled() {
	if q.hasHandle && q.plan.Family != nil {
		q.plan.Whole, q.plan.Family = q.plan.Decode, nil
	}
}

// blockSeqs appends the sequence hashes of the prompt's blocks to dst.
func (q *request) blockSeqs(dst []blockhash.Seq, salt blockhash.Salt, size int) []blockhash.Seq {
	if len(q.media) == 0 {
		if p := &q.prompt; size == incremental.BlockSize && len(p.Blocks) > 0 && salt == p.BlockSalt {
			return append(dst, p.Blocks...)
		}
		return blockhash.Seqs(dst, salt, q.prompt.Tokens, size)
	}
	return seqsWithMedia(dst, salt, q.prompt.Tokens, size, q.media)
}

// seqsWithMedia is blockhash.Seqs for a prompt with media. It tags each block that a medium
// overlaps with the medium's identity and its offset from the start of the block, as vLLM does from
// 0.19 on (kv_events.py, extra_keys: [identifier, offset]). media are sorted by From.
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

// appendTag appends the medium's identity in the encoding of KV events: msgpack of [identifier,
// offset].
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
	return msgp.AppendUint64(dst, uint64(offset)) // engines write the shortest form
}

// AddWaiter counts an in-process caller that waits for a worker before it makes a request. The
// caller calls remove when its wait ends. ok is false if PoolWaiters callers already wait.
func (r *Runner) AddWaiter() (remove func(), ok bool) {
	remove = func() { r.waiting.Add(-1) }
	if n, maxWaiters := r.waiting.Add(1), r.options().PoolWaiters; maxWaiters > 0 && n > int64(maxWaiters) {
		remove()
		return nil, false
	}
	return remove, true
}

// HandsOver reports whether the workers of a model can hand over requests of a kind. It returns
// true if the model is not disaggregated.
func (r *Runner) HandsOver(model string, kind front.Kind) bool {
	m := r.current.Load().pdOf(model)
	return m.family == nil || m.traits.Kinds.Has(kind)
}
