package notify

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/worker"
)

func TestBreakers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		log := slog.New(slog.NewTextHandler(&text, nil))
		var s Breakers
		r := &worker.Rank{ID: worker.ID{Worker: "p0"}, Worker: &worker.Worker{}}
		out := func(want bool, when string) {
			t.Helper()
			if got := s.IsOpen(r, time.Now()); got != want {
				t.Errorf("%s: out %v, want %v", when, got, want)
			}
		}
		out(false, "at first")
		s.RecordMiss(r, log)
		out(false, "after one miss")
		s.RecordNotified(r, log)
		s.RecordMiss(r, log)
		out(false, "after one miss since its notification")
		if text.Len() != 0 {
			t.Errorf("logged %s", text.String())
		}
		s.RecordMiss(r, log)
		out(true, "after two")
		time.Sleep(breakerRetry)
		out(false, "when its rest is over")
		s.RecordTrial(r)
		out(true, "while another request tries it")
		s.RecordMiss(r, log)
		time.Sleep(breakerRetry - time.Millisecond)
		out(true, "after one more miss")
		s.RecordNotified(r, log)
		out(false, "when it notified again")
		if n := s.count.Load(); n != 0 {
			t.Errorf("%d counted", n)
		}
		if n := strings.Count(text.String(), "sends no notifications"); n != 1 || strings.Count(text.String(), "sends notifications again") != 1 {
			t.Errorf("logged %s", text.String())
		}
	})
}
