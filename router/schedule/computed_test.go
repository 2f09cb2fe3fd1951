package schedule

import (
	"testing"

	"sluice/router/kvindex"
)

// TestComputedFollowsReports: Rank.Computed counts what the engine reports to have computed where it
// reports more than was predicted, before and after the first token, and never decreases.
func TestComputedFollowsReports(t *testing.T) {
	const length, predicted = 1600, 1280
	for _, c := range []struct {
		name     string
		reported int // cached tokens; -1: none reported
		first    bool
		want     int64
	}{
		{"no report", -1, false, length - predicted},
		{"as predicted", predicted, false, length - predicted},
		{"evicted, reported before the first token", 320, true, length - 320},
		{"evicted, reported at the end", 320, false, length - 320},
		{"more cached, reported before the first token", 1440, true, length - 1440},
		{"more cached, reported at the end", 1440, false, length - predicted},
	} {
		rs := ranks(1)
		s := New(testOptions)
		ix, tokens := kvindex.New(kvindex.Options{}), prompt(length)
		store(ix, rs[0], tokens, 16, predicted/16)
		var overlap kvindex.Overlap
		find(ix, &overlap, tokens, 16)
		choice, ok := s.Choose(&Query{Leg: WholeLeg, Candidates: rs, Overlap: &overlap, PromptTokens: length, MaxTokens: 10})
		if !ok || choice.CachedTokens != predicted {
			t.Fatalf("chose %v with %d cached tokens; want %d", ok, choice.CachedTokens, predicted)
		}
		res := choice.Reservation
		if c.first {
			res.Report("r", c.reported, 4)
			res.PrefillDone()
		} else {
			res.PrefillDone()
			res.Report("r", c.reported, 4)
		}
		if own := rs[0].Computed.Load() - res.computed; own != 0 {
			t.Errorf("%s: %d of the leg's own tokens count as those of others", c.name, own)
		}
		res.Release()
		if got := rs[0].Computed.Load(); got != c.want {
			t.Errorf("%s: computed %d tokens; want %d", c.name, got, c.want)
		}
	}
}
