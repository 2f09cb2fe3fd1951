package worker

import "testing"

// The second node of a deployment of 16 ranks that is balanced by node has the engine's
// ranks 8 to 15, which its server calls 0 to 7.
func TestRankNumbers(t *testing.T) {
	for name, c := range map[string]struct {
		spec           Spec
		reported       int // the lowest rank that the engine shows
		engine, header []int
	}{
		"one node":                           {Spec{Ranks: []uint16{0, 1}}, 0, []int{0, 1}, []int{0, 1}},
		"counted from 0, reported":           {Spec{Ranks: []uint16{0, 1}}, 8, []int{8, 9}, []int{0, 1}},
		"counted from 0, configured":         {Spec{Ranks: []uint16{0, 1}, StartRank: 8}, 0, []int{8, 9}, []int{0, 1}},
		"configured otherwise than reported": {Spec{Ranks: []uint16{0, 1}, StartRank: 8}, 4, []int{8, 9}, []int{0, 1}},
		"the engine's numbers, reported":     {Spec{Ranks: []uint16{8, 9}}, 8, []int{8, 9}, []int{0, 1}},
		"the engine's numbers, not reported": {Spec{Ranks: []uint16{8, 9}}, 0, []int{8, 9}, []int{8, 9}},
		"some of them":                       {Spec{Ranks: []uint16{9, 11}, StartRank: 8}, 0, []int{9, 11}, []int{1, 3}},
		"one rank of several, by itself":     {Spec{Ranks: []uint16{2}}, 2, []int{2}, []int{0}},
		"no ranks written":                   {Spec{}, 3, []int{3}, []int{0}},
		"a server for each":                  {Spec{Ranks: []uint16{0, 1}, RankURLs: []string{"a", "b"}}, 1, []int{0, 1}, []int{0, 1}},
	} {
		w := New(c.spec)
		info := *w.Info()
		info.StartRank = c.reported
		w.SetInfo(&info)
		for i, r := range w.Ranks {
			if e, h := r.EngineRank(), r.HeaderRank(); e != c.engine[i] || h != c.header[i] {
				t.Errorf("%s: rank %d is %d to the engine and %d in the header, want %d and %d", name, r.ID.Rank, e, h, c.engine[i], c.header[i])
			}
		}
	}
	if r := (&Rank{ID: ID{Rank: 3}}); r.EngineRank() != 3 || r.HeaderRank() != 3 {
		t.Error("a rank of no worker")
	}
}
