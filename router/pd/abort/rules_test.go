package abort

import (
	"testing"
	"time"

	"sluice/router/pd/family"
)

// TestAbortRulesAreComplete checks that every phase that legs can be in has a rule, and that the
// rule frees what the legs lease.
func TestAbortRulesAreComplete(t *testing.T) {
	for class := legClass(0); class < legClasses; class++ {
		concurrent := class == classRoom || class == classTransfer
		for phase := Phase(0); phase < phases; phase++ {
			rule := rules[class][phase]
			if exists := !concurrent || phase >= PhaseDecode; (rule != Rule{}) != exists {
				t.Errorf("class %d, phase %d: rule %v, want one: %v", class, phase, rule, exists)
				continue
			} else if !exists {
				continue
			}
			if leased := class == classLeased || class == classTransfer; (rule.Reclaim == ReclaimNothing) == leased {
				t.Errorf("class %d, phase %d: reclaim %d, though it leases: %v", class, phase, rule.Reclaim, leased)
			}
			if byRelay := rule.Cancel == CancelByRelay || rule.Cancel == CancelByRelayAfterGrace; byRelay != (phase == PhaseStream) || (rule.Cancel == CancelNothing) != (phase == PhaseBetween) {
				t.Errorf("class %d, phase %d: cancel %d", class, phase, rule.Cancel)
			}
			if both := rule.Cancel == CancelBoth || rule.Cancel == CancelPrefillFirst; both && !concurrent {
				t.Errorf("class %d, phase %d: cancels a second leg that there is not", class, phase)
			}
		}
	}
}

// TestAbortRuleOfEachFamily checks the rule of each family's legs in every phase.
func TestAbortRuleOfEachFamily(t *testing.T) {
	type row = [phases]CancelRule
	unleased := row{CancelNow, CancelNothing, CancelNow, CancelNow, CancelByRelay}
	leased := row{CancelAfterAnswer, CancelNothing, CancelAfterAdmission, CancelNow, CancelByRelayAfterGrace}
	room := row{PhaseDecode: CancelBoth, PhaseAnswer: CancelBoth, PhaseStream: CancelByRelay}
	transfer := row{PhaseDecode: CancelAfterAdmission, PhaseAnswer: CancelPrefillFirst, PhaseStream: CancelByRelayAfterGrace}
	for _, k := range []struct {
		family     string
		concurrent bool
		want       row
	}{
		{"nixl", false, leased}, {"nixl-push", false, leased}, {"trtllm", false, leased},
		{"mooncake", false, leased}, {"mooncake", true, transfer},
		{"sglang", false, unleased}, {"sglang", true, room},
		{"lmcache", false, unleased}, {"storage", false, unleased}, {"orchestrated", false, unleased},
	} {
		f, err := family.ByName(k.family)
		if err != nil {
			t.Fatal(err)
		}
		traits := f.Traits()
		for phase := Phase(0); phase < phases; phase++ {
			if k.concurrent && phase < PhaseDecode {
				continue
			}
			if got := rules[classOf(phase, &traits, k.concurrent, true)][phase].Cancel; got != k.want[phase] {
				t.Errorf("%s, concurrent %v, phase %d: %d, want %d", k.family, k.concurrent, phase, got, k.want[phase])
			}
		}
		// Decode without a handle runs the whole request and leases nothing.
		if got := classOf(PhaseDecode, &traits, false, false); got != classUnleased {
			t.Errorf("%s without a handle: class %d", k.family, got)
		}
	}
}

// TestStreamRules checks what the row of PhaseStream makes of a stream that ends between its head and
// its first event: for how long the engine's connection stays open, and whether the blocks of a handle
// are released. Every class has a row.
func TestStreamRules(t *testing.T) {
	const delay = 3 * time.Second
	for class, want := range map[legClass]struct {
		grace, releasable time.Duration // grace of the connection without and with a side channel
		ended             kvState       // of blocks that decode was sent
	}{
		classUnleased: {0, 0, kvFetched},
		classLeased:   {delay, maxReleaseWait, kvReclaimed},
		classRoom:     {0, 0, kvFetched},
		classTransfer: {delay, maxReleaseWait, kvFetched},
	} {
		rule := rules[class][PhaseStream]
		if got := rule.CloseGrace(delay, false); got != want.grace {
			t.Errorf("class %d: the connection stays open for %s, want %s", class, got, want.grace)
		}
		if got := rule.CloseGrace(delay, true); got != want.releasable {
			t.Errorf("class %d, releasable: the connection stays open for %s, want %s", class, got, want.releasable)
		}
		request := KV{state: kvSent}
		stream := request.HandOver(rule.Reclaim, 0)
		if stream.GiveUp(); stream.state != want.ended {
			t.Errorf("class %d: blocks end in state %d, want %d", class, stream.state, want.ended)
		}
	}
	for class := range legClasses {
		for phase := range phases {
			if rule := rules[class][phase]; phase != PhaseStream && rule.CloseGrace(delay, false) != 0 {
				t.Errorf("class %d, phase %d: the relay waits, but has no stream", class, phase)
			}
		}
	}
}
