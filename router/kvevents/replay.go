package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/backoff"
	"sluice/dataplane/zmtp"
	"sluice/router/worker"
)

var (
	errStopped        = errors.New("the feed is stopping")
	errRestarted      = errors.New("the engine has restarted")
	errMissing        = errors.New("messages of the replay are missing")
	errConnectionLost = errors.New("the engine closed the connection")
	errNoAnswer       = errors.New("the publisher does not answer pings")
)

// replayEnd is the number of the message that ends a replay: -1.
const replayEnd = math.MaxUint64

// defaultMaxIdleTimeouts bounds, in ReplayTimeouts, how long a catch-up continues without new
// messages. A catch-up that makes progress is not ended: a long replay to a slow machine would
// otherwise start again from its first message, repeatedly.
const defaultMaxIdleTimeouts = 12

// maxRestarts bounds how many new incarnations one catch-up follows. If the engine restarts more
// often, the next retry continues.
const maxRestarts = 3

// maxReplayed bounds the stored hashes of replayed messages.
const maxReplayed = 1 << 20

// catchUp brings the position up to date by replay and sets the feed's state. With resume, the
// applied messages remain valid and the messages from next on are requested, together with the one
// before, which verifies that the incarnation is the same. Otherwise all messages that the engine
// keeps are requested, and the rank is cleared when the first arrives. With suspect, the rank is
// cleared if the verification fails. After a failure the rank is cleared, the feed is broken and a
// retry is due.
func (f *feed) catchUp(resume, suspect bool) {
	if !f.checking && !(suspect && f.state() == worker.FeedBroken) {
		f.setState(worker.FeedSyncing)
	}
	f.flush()
	deadline := f.catchUpDeadline()
	r := &replay{feed: f, empty: !resume, suspect: suspect, deadline: deadline, turn: applyTurn{limiter: f.limiter}, answers: inbox{maxBytes: f.options.inboxBytes}}
	err := r.run()
	for lives := 0; lives < maxRestarts && errors.Is(err, errRestarted); lives++ {
		f.newIncarnation()
		r = &replay{feed: f, empty: true, applied: true, deadline: deadline, turn: applyTurn{limiter: f.limiter}, answers: inbox{maxBytes: f.options.inboxBytes}}
		err = r.run()
	}
	f.wake() // the replay has consumed wake-ups for the feed
	switch {
	case err == nil:
		f.known, f.retryAt = true, time.Time{}
		f.retry.Reset()
		f.markLive()
		if !f.checking {
			// The engine may have processed the replay request before the subscription: the feed
			// has not received what the engine published in between, even if that was its last
			// message for now.
			f.checkAt = time.Now().Add(f.options.TailCheck)
		}
	case errors.Is(err, errStopped):
	case f.checking && !r.applied: // no answer proves nothing
		f.counts["replay_failures"]++
		f.checkAt = time.Now().Add(f.options.RetryMax)
	default:
		f.counts["replay_failures"]++
		// A broken feed whose retry failed keeps what it has learned from live messages.
		if r.applied || f.retryAt.IsZero() {
			f.clearUntrusted("resets")
			f.position = position{}
		}
		f.known = true
		delay := f.retry.Next(f.options.RetryMin, f.options.RetryMax)
		f.retryAt = time.Now().Add(delay)
		f.setState(worker.FeedBroken)
		f.log.Warn("kv events: replay failed; the rank's overlap is unknown until a replay succeeds",
			"endpoint", f.source.ReplayEndpoint, "retry_in", delay, "error", err)
	}
}

// replay is the state of one catch-up. It sends several requests if answers are lost.
type replay struct {
	*feed
	empty       bool // no applied message is valid
	suspect     bool
	applied     bool // the rank was cleared or changed
	missing     bool // message missingAt was requested, and a later one arrived
	missingAt   uint64
	answers     inbox  // to the current request, read ahead
	answerBytes uint64 // number of answers so far
	readErr     error  // why no more answers can be read
	turn        applyTurn

	deadline time.Time // moved by every new message
}

// catchUpDeadline is when a catch-up ends that receives nothing new from now on.
func (f *feed) catchUpDeadline() time.Time {
	return time.Now().Add(f.options.maxIdleTimeouts * f.options.ReplayTimeout)
}

func (r *replay) run() error {
	for {
		before, began := r.next, r.applied
		err := r.request()
		progress := r.applied && (!began || r.next > before)
		switch {
		case err == nil, errors.Is(err, errStopped), errors.Is(err, errRestarted):
			return err
		case errors.Is(err, errMissing): // once per message
		case !progress, time.Now().After(r.deadline):
			return err
		}
	}
}

// request sends one request and applies the answers.
func (r *replay) request() error {
	done, ok := r.limiter.acquire(r.ctx)
	if !ok {
		return errStopped
	}
	defer done()
	dealer, err := r.connect()
	if err != nil {
		return err
	}
	defer dealer.Close()
	defer r.turn.release()
	from := uint64(0)
	if !r.empty && r.next > 0 {
		from = r.next - 1
	}
	r.counts["replays"]++
	r.answers.clear()
	r.readErr = nil
	if err := dealer.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return fmt.Errorf("cannot send the replay request: %w", err)
	}
	for first := true; ; first = false {
		seq, payload, err := r.receive(dealer)
		if err == nil && time.Now().After(r.deadline) {
			err = fmt.Errorf("no new message within %v", r.options.maxIdleTimeouts*r.options.ReplayTimeout)
		}
		if err != nil {
			return err
		}
		if seq == replayEnd {
			return r.handleEnd(first, from)
		}
		if first {
			err = r.handleFirst(seq, payload)
		} else {
			err = r.handleNext(seq, payload)
		}
		if err != nil {
			return err
		}
	}
}

// connect connects to the replay endpoint. An engine that has just started may publish before it
// answers requests, so a refused connection is retried.
func (r *replay) connect() (*zmtp.Stream, error) {
	ctx, cancel := context.WithTimeout(r.ctx, r.options.ReplayTimeout)
	defer cancel()
	for {
		s, err := zmtp.Connect(ctx, r.source.ReplayEndpoint, r.streamOptions("DEALER"))
		if err == nil {
			if err = r.poller.Watch(s, r.wake); err == nil {
				return s, nil
			}
			s.Close()
		}
		if !backoff.Sleep(ctx, backoff.Jitter(dialMin)) {
			if r.stopping.Load() {
				return nil, errStopped
			}
			return nil, fmt.Errorf("cannot connect: %w", err)
		}
	}
}

// handleFirst handles the first message of an answer, which shows whether the answer continues the
// applied messages.
func (r *replay) handleFirst(seq uint64, payload []byte) error {
	switch {
	case r.empty:
		if r.hasLast || !r.applied {
			// The replay contains what was learned live while it failed.
			r.clear()
		}
		r.position = position{known: true, next: seq, replayedFrom: seq}
		r.empty = false
	case r.next > 0 && seq == r.next-1 && r.hasLast:
		if xxh3.Hash(payload) != r.lastHash {
			return errRestarted
		}
		r.markVerified()
		return nil
	case seq == r.next && !r.hasLast && !r.suspect:
	case seq < r.next:
		return fmt.Errorf("first message is %d; %d was requested", seq, r.next)
	default:
		// The engine no longer keeps the missing messages, or cannot prove its identity.
		r.skipTo(seq)
	}
	return r.applyAnswer(seq, payload)
}

// skipTo gives up the messages before seq and drops the rank's blocks.
func (r *replay) skipTo(seq uint64) {
	r.clearUntrusted("resets")
	r.position = position{known: true, next: seq, replayedFrom: seq}
	r.markVerified()
}

// markVerified records that the index's blocks of the rank belong to this incarnation of the
// engine.
func (r *replay) markVerified() {
	if r.suspect && !r.checking {
		r.setState(worker.FeedSyncing)
	}
	r.suspect = false
}

func (r *replay) handleNext(seq uint64, payload []byte) error {
	switch {
	case seq < r.next:
		return nil
	case seq > r.next && !(r.missing && r.missingAt == r.next):
		r.missing, r.missingAt = true, r.next
		return errMissing // the engine's socket was full; request again from here
	case seq > r.next:
		r.skipTo(seq) // requested twice and still missing: it is gone
	}
	return r.applyAnswer(seq, payload)
}

func (r *replay) applyAnswer(seq uint64, payload []byte) error {
	if r.next != r.replayedFrom+uint64(len(r.replayed)) {
		r.replayedFrom, r.replayed = r.next, nil
	}
	if len(r.replayed) == 0 {
		b, _ := r.decoder.Reset(payload)
		r.replayedTime = b.Time
	}
	r.applied, r.deadline = true, r.catchUpDeadline()
	hashes, from := append(r.replayed, xxh3.Hash(payload)), r.replayedFrom
	if len(hashes) > maxReplayed {
		hashes, from = append([]uint64(nil), hashes[maxReplayed/2:]...), from+maxReplayed/2
		b, _ := r.decoder.Reset(payload) // earlier messages were replayed if they are not newer than this one
		r.replayedTime = b.Time
	}
	r.counts["replayed_batches"]++
	r.apply(seq, payload)
	r.replayed, r.replayedFrom = hashes, from
	return nil
}

// handleEnd handles the end of an answer.
func (r *replay) handleEnd(empty bool, from uint64) error {
	switch {
	case !empty:
	case r.empty:
		// The engine has published nothing yet.
		if r.hasLast {
			r.clear()
		}
		r.position = position{known: true}
	case from > 0 || r.next > 0:
		return errRestarted // it has published less than the feed has applied
	}
	return nil
}

// receive waits for one message of the answer. The number and the payload are the last two frames;
// before them are a delimiter and, in newer releases, the topic.
//
// Both connections are read ahead: the replay of vLLM up to 0.32 drops messages that do not fit its
// queue of 1,000, and a live connection that is not read does not show that it is lost.
func (r *replay) receive(dealer *zmtp.Stream) (seq uint64, payload []byte, err error) {
	until := time.Now().Add(r.options.ReplayTimeout)
	if until.After(r.deadline) {
		until = r.deadline
	}
	for {
		if r.stopping.Load() {
			return 0, nil, errStopped
		}
		if r.answerBytes%applyBurst == 0 || len(r.answers.queue) == 0 {
			r.readAvailable(dealer)
		}
		if m, ok := r.answers.pop(); ok {
			if !r.turn.acquire(r.ctx) {
				return 0, nil, errStopped
			}
			r.answerBytes++
			n := len(m)
			if n < 3 || n > 4 || len(m[n-2]) != 8 {
				r.counts["malformed"]++
				return 0, nil, fmt.Errorf("message has %d frames; want a delimiter, an optional topic, a number and a payload", n)
			}
			return binary.BigEndian.Uint64(m[n-2]), m[n-1], nil
		}
		if r.readErr != nil {
			return 0, nil, r.readErr
		}
		r.turn.release()
		if !r.await(until) {
			return 0, nil, fmt.Errorf("no message within %v", r.options.ReplayTimeout)
		}
	}
}

// readAvailable reads the available answers and live messages.
func (r *replay) readAvailable(dealer *zmtp.Stream) {
	buf := r.acquireBuffer()
	defer r.releaseBuffer(buf)
	for r.readErr == nil && !r.answers.full() {
		m, ok, err := dealer.Next()
		if ok {
			r.answers.push(m)
			continue
		}
		n := 0
		if err == nil {
			n, _, err = dealer.Fill(*buf)
		}
		if errors.Is(err, io.EOF) {
			err = errConnectionLost
		}
		if r.readErr = err; n == 0 {
			break
		}
	}
	dealer.Detach()
	r.readAhead(*buf)
}

// await waits until data may be available; it returns false after until.
func (r *replay) await(until time.Time) bool {
	left := time.Until(until)
	if left <= 0 {
		return false
	}
	r.timerAt = until
	r.timer.Reset(left)
	select {
	case <-r.wakeCh:
	case <-r.timer.C:
		r.timerAt = time.Time{}
	case <-r.ctx.Done():
	}
	return true
}
