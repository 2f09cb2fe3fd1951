package core

import (
	"time"

	"sluice/bench/sim/faults"
)

// emit ends a step: one token for every sequence whose context is computed.
func (r *Rank) emit() {
	r.batch = append(r.batch[:0], r.running...)
	for _, s := range r.batch {
		j := s.Job
		if j.ended || s.chunk == 0 && !s.tokenPending || s.computed != s.Total() {
			continue
		}
		s.chunk = 0
		if j.Fault != nil && r.triggerFault(s) {
			s.tokenPending = true
			continue
		}
		s.tokenPending = false
		id, last := s.Produce()
		text := s.AddText(id)
		last = last || s.Reason != ""
		r.Counters.Generated++
		if j.Leg != nil && last && j.Leg.HoldLastToken(r, s) {
			s.lastHeld, s.heldText = true, text
			r.heldLast[s] = struct{}{}
			continue
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
		if s.Reason == "" && !s.Job.ended {
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
func (r *Rank) sendToken(s *Seq, id uint32, text string) {
	j := s.Job
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
func (r *Rank) finishSeq(s *Seq) {
	j := s.Job
	r.Counters.finish(s.Reason)
	if j.Leg == nil || !j.Leg.RetainBlocks(r, s) {
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
		if f := j.Fault; f != nil && f.Phase == "answer" {
			r.delayAnswer(j, f, b)
			return
		}
		j.conn.Respond(j.Request, 200, "application/json", b)
	}
	r.markAnswered(j)
}

// delayAnswer sends a whole response when the fault's time has passed, unless the
// client has disconnected by then: an API server responds a moment after its core has
// finished.
func (r *Rank) delayAnswer(j *Job, f *faults.Fault, body []byte) {
	j.finished = true
	r.Counters.DelayedAnswers++
	r.Process.Go(func() {
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
		case <-r.Process.Context.Done():
		}
		r.Post(func() {
			r.Counters.DelayedAnswers--
			if !j.ended {
				j.conn.Respond(j.Request, 200, "application/json", body)
				r.markAnswered(j)
			}
		})
	})
}

// triggerFault applies the job's fault when its time has come. It returns true if s
// gets no token now.
func (r *Rank) triggerFault(s *Seq) bool {
	j, f := s.Job, s.Job.Fault
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
			j.Fault = nil
			return false
		}
		s.stalledUntil = time.Now().Add(1000 * time.Hour)
		if f.Delay > 0 {
			s.stalledUntil = time.Now().Add(f.Delay)
		}
	case faults.Reset:
		r.drop(j)
		j.conn.Reset()
		r.markAnswered(j)
	case faults.Truncate:
		r.drop(j)
		j.Request.Close = true
		if !j.headSent && f.Phase == "body" {
			j.conn.Send([]byte(truncatedAnswerBytes))
		}
		r.markAnswered(j)
	case faults.Malformed:
		r.drop(j)
		if j.headSent {
			r.scratch.Open(&j.Response)
			r.scratch.End(append(r.scratch.Begin(), "data: {\"id\": {{{\n\n"...))
			r.scratch.Finish()
		} else {
			j.conn.Respond(j.Request, 200, "application/json", []byte(MalformedBody))
		}
		r.markAnswered(j)
	case faults.StreamFail:
		r.Fail(j, 500, "Internal server error")
	case faults.Crash:
		r.Fail(j, 500, DeadMessage)
		go r.Process.Crash()
	default:
		return false
	}
	return true
}

// truncatedAnswerBytes is the length of a whole response that a fault truncates.
const truncatedAnswerBytes = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"id\": \"trunc"

// MalformedBody is a response that is not JSON.
const MalformedBody = `{"id": "malformed", "choices": [{{{`
