package main

import "testing"

func TestCollector(t *testing.T) {
	c := collector{percent: roomy}
	for i, step := range []struct {
		cycles, live, held uint64
		percent            int
		quiet              bool
	}{
		{1, 0, leanHeld, roomy, false},
		{2, leanFrom - 1, leanHeld, roomy, false},     // Go collects: there is no need to ask
		{2, leanFrom - 1, leanHeld - 1, roomy, false}, // little is held
		{2, leanFrom - 1, leanHeld, roomy, true},      // it has not since the last look
		{4, leanFrom - 1, leanHeld, roomy, false},     // 3 and 4 were asked for
		{4, leanFrom - 1, leanHeld, roomy, false},     // and are not again
		{5, leanFrom, leanHeld, lean, false},          // Go did
		{5, leanFrom - 1, leanHeld, lean, true},       // and has not since
		{8, leanUntil, leanHeld, lean, false},
		{9, leanUntil - 1, leanHeld, roomy, false}, // the heap is small
	} {
		quiet := c.look(step.cycles, step.live, step.held)
		if quiet != step.quiet || c.percent != step.percent {
			t.Errorf("step %d: quiet %v, %d %%; want %v, %d", i, quiet, c.percent, step.quiet, step.percent)
		}
		if quiet {
			c.asked(step.cycles + 2)
		}
	}
}
