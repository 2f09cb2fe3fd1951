package pd

import (
	"testing"

	"sluice/router/pd/family"
)

// TestAbortRulesAreComplete checks that every phase that legs can be in has a rule, and that the
// rule frees what the legs pin.
func TestAbortRulesAreComplete(t *testing.T) {
	for pin := kvPin(0); pin < kvPins; pin++ {
		concurrent := pin == pinRoom || pin == pinTransfer
		for phase := abortPhase(0); phase < abortPhases; phase++ {
			rule := abortRules[pin][phase]
			if exists := !concurrent || phase >= phaseDecode; (rule != abortRule{}) != exists {
				t.Errorf("pin %d, phase %d: rule %v, want one: %v", pin, phase, rule, exists)
				continue
			} else if !exists {
				continue
			}
			if pinned := pin == pinLeased || pin == pinTransfer; (rule.reclaim == reclaimNothing) == pinned {
				t.Errorf("pin %d, phase %d: reclaim %d, though it pins: %v", pin, phase, rule.reclaim, pinned)
			}
			if (rule.cancel == cancelByRelay) != (phase == phaseStream) || (rule.cancel == cancelNothing) != (phase == phaseBetween) {
				t.Errorf("pin %d, phase %d: cancel %d", pin, phase, rule.cancel)
			}
			if both := rule.cancel == cancelBoth || rule.cancel == cancelPrefillFirst; both && !concurrent {
				t.Errorf("pin %d, phase %d: cancels a second leg that there is not", pin, phase)
			}
		}
	}
}

// TestAbortRuleOfEachFamily checks the rule of each family's legs in every phase.
func TestAbortRuleOfEachFamily(t *testing.T) {
	type rules = [abortPhases]cancelRule
	unpinned := rules{cancelNow, cancelNothing, cancelNow, cancelNow, cancelByRelay}
	leased := rules{cancelAfterAnswer, cancelNothing, cancelAfterAdmission, cancelNow, cancelByRelay}
	room := rules{phaseDecode: cancelBoth, phaseAnswer: cancelBoth, phaseStream: cancelByRelay}
	transfer := rules{phaseDecode: cancelAfterAdmission, phaseAnswer: cancelPrefillFirst, phaseStream: cancelByRelay}
	for _, k := range []struct {
		family     string
		concurrent bool
		want       rules
	}{
		{"nixl", false, leased}, {"nixl-push", false, leased}, {"trtllm", false, leased},
		{"mooncake", false, leased}, {"mooncake", true, transfer},
		{"sglang", false, unpinned}, {"sglang", true, room},
		{"lmcache", false, unpinned}, {"storage", false, unpinned}, {"orchestrated", false, unpinned},
	} {
		f, err := family.ByName(k.family)
		if err != nil {
			t.Fatal(err)
		}
		traits := f.Traits()
		for phase := abortPhase(0); phase < abortPhases; phase++ {
			if k.concurrent && phase < phaseDecode {
				continue
			}
			if got := abortRules[pinOf(phase, &traits, k.concurrent, true)][phase].cancel; got != k.want[phase] {
				t.Errorf("%s, concurrent %v, phase %d: %d, want %d", k.family, k.concurrent, phase, got, k.want[phase])
			}
		}
		// Decode without a handle runs the whole request and pins nothing.
		if got := pinOf(phaseDecode, &traits, false, false); got != pinNothing {
			t.Errorf("%s without a handle: pin %d", k.family, got)
		}
	}
}
