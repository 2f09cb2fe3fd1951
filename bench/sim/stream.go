package sim

import (
	"time"

	"sluice/bench/sim/faults"
)

// emit ends a step: one token for every sequence whose context is computed.
func (r *rank) emit() {
	r.batch = append(r.batch[:0], r.running...)
	for _, s := range r.batch {
		j := s.j
		if j.ended || s.chunk == 0 && !s.tokenPending || s.computed != s.Total() {
			continue
		}
		s.chunk = 0
		if j.fault != nil && r.triggerFault(s) {
			s.tokenPending = true
			continue
		}
		s.tokenPending = false
		id, last := s.Produce()
		text := s.AddText(id)
		last = last || s.Reason != ""
		r.counters.generated++
		if pd := j.pd; pd != nil && last && pd.holdLastToken(r, s) {
			s.lastHeld, s.heldText = true, text
			r.heldLast[s] = struct{}{}
			continue
		}
		if last {
			r.leasePrefill(s)
		}
		r.sendToken(s, id, text)
		if j.Params.Stream && r.o.Coalesce {
			r.dirty = append(r.dirty, j)
		}
		if last {
			r.finishSeq(s)
		}
	}
	clear(r.batch)
	keep := r.running[:0]
	for _, s := range r.running {
		if s.Reason == "" && !s.j.ended {
			keep = append(keep, s)
		}
	}
	clear(r.running[len(keep):])
	r.running = keep
	for i, j := range r.dirty {
		if !j.ended {
			r.scratch.Open(&j.Response)
			r.scratch.Flush()
		}
		r.dirty[i] = nil
	}
	r.dirty = r.dirty[:0]
}

// sendToken sends a token to the client of a stream.
func (r *rank) sendToken(s *seq, id uint32, text string) {
	j := s.j
	if !j.Params.Stream {
		j.Events++
		return
	}
	r.scratch.Open(&j.Response)
	if !s.started {
		s.started = true
		j.Format.First(&r.scratch, &s.Choice)
	}
	j.Format.Delta(&r.scratch, &s.Choice, id, text)
}

// finishSeq ends a sequence and, with the last one of its job, the response.
func (r *rank) finishSeq(s *seq) {
	j := s.j
	r.counters.finish(s.Reason)
	if s.leased {
	} else if pd := j.pd; pd == nil || !pd.retainBlocks(r, s) {
		r.pool.Release(s.blocks)
		s.blocks = nil
	}
	if j.Unfinished--; j.Unfinished > 0 {
		return
	}
	if j.Params.Stream {
		r.scratch.Open(&j.Response)
		j.Format.Last(&r.scratch, &j.Response)
		r.scratch.Finish()
	} else {
		b := j.Format.Full(make([]byte, 0, 1024), &j.Response)
		if f := j.fault; f != nil && f.Phase == "answer" {
			r.delayAnswer(j, f, b)
			return
		}
		j.c.Respond(j.req, 200, "application/json", b)
	}
	r.markAnswered(j)
}

// delayAnswer sends a whole response when the fault's time has passed, unless the
// client has disconnected by then: an API server responds a moment after its core has
// finished.
func (r *rank) delayAnswer(j *job, f *faults.Fault, body []byte) {
	j.finished = true
	r.counters.delayedAnswers++
	r.l.wg.Go(func() {
		after := make(<-chan time.Time) // never
		if f.Delay > 0 {
			t := time.NewTimer(f.Delay)
			defer t.Stop()
			after = t.C
		}
		select {
		case <-after:
		case <-f.Until:
		case <-j.done:
		case <-r.l.stopc:
		}
		r.post(func() {
			r.counters.delayedAnswers--
			if !j.ended {
				j.c.Respond(j.req, 200, "application/json", body)
				r.markAnswered(j)
			}
		})
	})
}

// triggerFault applies the job's fault when its time has come. It returns true if s
// gets no token now.
func (r *rank) triggerFault(s *seq) bool {
	j, f := s.j, s.j.fault
	if s.stalledUntil.After(time.Now()) {
		return true
	}
	if f.Kind == faults.Slow {
		if s.stalledUntil.IsZero() {
			s.stalledUntil = time.Now().Add(f.Delay)
			return true
		}
		s.stalledUntil = time.Time{}
		return false
	}
	if j.Events < f.After || f.Phase == "answer" {
		return false
	}
	if f.Phase == "role" && j.headSent && !s.started {
		s.started = true
		r.scratch.Open(&j.Response)
		j.Format.First(&r.scratch, &s.Choice)
		r.scratch.Flush()
	}
	switch f.Kind {
	case faults.Stall:
		if f.Delay > 0 && !s.stalledUntil.IsZero() {
			j.fault = nil
			return false
		}
		s.stalledUntil = time.Now().Add(1000 * time.Hour)
		if f.Delay > 0 {
			s.stalledUntil = time.Now().Add(f.Delay)
		}
	case faults.Reset:
		r.drop(j)
		j.c.Reset()
		r.markAnswered(j)
	case faults.Cut:
		r.drop(j)
		j.req.Close = true
		if !j.headSent && f.Phase == "body" {
			j.c.Send([]byte(truncatedAnswerBytes))
		}
		r.markAnswered(j)
	case faults.Garbage:
		r.drop(j)
		if j.headSent {
			r.scratch.Open(&j.Response)
			r.scratch.End(append(r.scratch.Begin(), "data: {\"id\": {{{\n\n"...))
			r.scratch.Finish()
		} else {
			j.c.Respond(j.req, 200, "application/json", []byte(garbageBody))
		}
		r.markAnswered(j)
	case faults.StreamFail:
		r.fail(j, 500, "Internal server error")
	case faults.Dead:
		r.fail(j, 500, deadMessage)
		go r.e.crash(r.l, false)
	default:
		return false
	}
	return true
}

// truncatedAnswerBytes is the length of a whole response that a fault truncates.
const truncatedAnswerBytes = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"id\": \"cut"
