package disagg

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/worker"
)

func TestSilences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		log := slog.New(slog.NewTextHandler(&text, nil))
		var s silences
		r := &worker.Rank{ID: worker.ID{Worker: "p0"}, Worker: &worker.Worker{}}
		out := func(want bool, when string) {
			t.Helper()
			if got := s.out(r, time.Now()); got != want {
				t.Errorf("%s: out %v, want %v", when, got, want)
			}
		}
		out(false, "at first")
		s.missed(r, log)
		out(false, "after one miss")
		s.told(r, log)
		s.missed(r, log)
		out(false, "after one miss since it told")
		if text.Len() != 0 {
			t.Errorf("logged %s", text.String())
		}
		s.missed(r, log)
		out(true, "after two")
		time.Sleep(silentRest)
		out(false, "when its rest is over")
		s.tried(r)
		out(true, "while another request tries it")
		s.missed(r, log)
		time.Sleep(silentRest - time.Millisecond)
		out(true, "after one more miss")
		s.told(r, log)
		out(false, "when it told again")
		if n := s.count.Load(); n != 0 {
			t.Errorf("%d counted", n)
		}
		if n := strings.Count(text.String(), "does not tell"); n != 1 || strings.Count(text.String(), "tells again") != 1 {
			t.Errorf("logged %s", text.String())
		}
	})
}
