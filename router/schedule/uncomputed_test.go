package schedule

import (
	"testing"
	"testing/synctest"
	"time"
)

// A prompt waits behind the holder's first one for what is left of that, and does not take a rank whose
// first prompt is overdue for an idle one.
func TestQueueShrinksWhileItsFirstPromptIsComputed(t *testing.T) {
	for _, c := range []struct {
		after    time.Duration // since the holder began its 2,000 tokens, which take 200 ms
		toHolder bool          // which saves 80 ms
	}{{0, false}, {100 * time.Millisecond, false}, {140 * time.Millisecond, true}, {300 * time.Millisecond, true}, {500 * time.Millisecond, false}} {
		synctest.Test(t, func(t *testing.T) {
			rs := ranks(2)
			toks := prompt(1600)
			s := New(placed(0, 0))
			time.Sleep(time.Second)
			first, _ := s.Choose(&Query{Leg: WholeLeg, Candidates: rs[:1], PromptTokens: 2000, MaxTokens: 16})
			time.Sleep(c.after)
			second, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, Overlap: holding(rs[0], toks, 50), PromptTokens: 1600})
			if got := second.Rank == rs[0]; got != c.toHolder {
				t.Errorf("after %v: a prompt goes to %v", c.after, second.Rank.ID)
			}
			first.Reservation.Release()
			second.Reservation.Release()
		})
	}
}

// The rate is learned from what a leg waits for, not from what had been computed before it came.
func TestTokensBeforeAreUncomputed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rs := ranks(1)
		s := New(testOptions)
		q := Query{Leg: WholeLeg, Candidates: rs, PromptTokens: 4000, MaxTokens: 16}
		first, _ := s.Choose(&q)
		time.Sleep(100 * time.Millisecond) // 1,000 tokens
		second, _ := s.Choose(&q)
		if got := second.Reservation.tokensBefore; got != 3000 {
			t.Errorf("%d tokens before, want 3000", got)
		}
		// Two prompts of 4,000 tokens: only the first one shrinks.
		time.Sleep(100 * time.Millisecond)
		third, _ := s.Choose(&q)
		if got := third.Reservation.tokensBefore; got != 6000 {
			t.Errorf("%d tokens before, want 6000", got)
		}
		first.Reservation.PrefillDone()
		fourth, _ := s.Choose(&q)
		if got := fourth.Reservation.tokensBefore; got != 8000 {
			t.Errorf("%d tokens before after the first token, want 8000", got)
		}
		for _, c := range []Choice{first, second, third, fourth} {
			c.Reservation.Release()
		}
		mustBeEmpty(t, s, rs)
	})
}

// A rank without a rate counts its queue in full.
func TestUncomputedWithoutARate(t *testing.T) {
	if got := uncomputed(ranks(1)[0], 100, 1, 0, 5); got != 100 {
		t.Errorf("%d tokens of 100", got)
	}
}
