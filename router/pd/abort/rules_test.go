package abort

import (
	"testing"
	"time"

	"sluice/router/pd/family"
)

// TestAbortRulesAreComplete checks that every phase that legs can be in has a rule, and that the
// rule frees what the legs pin.
func TestAbortRulesAreComplete(t *testing.T) {
	for pin := kvPin(0); pin < kvPins; pin++ {
		concurrent := pin == pinRoom || pin == pinTransfer
		for phase := Phase(0); phase < phases; phase++ {
			rule := rules[pin][phase]
			if exists := !concurrent || phase >= PhaseDecode; (rule != Rule{}) != exists {
				t.Errorf("pin %d, phase %d: rule %v, want one: %v", pin, phase, rule, exists)
				continue
			} else if !exists {
				continue
			}
			if pinned := pin == pinLeased || pin == pinTransfer; (rule.Reclaim == ReclaimNothing) == pinned {
				t.Errorf("pin %d, phase %d: reclaim %d, though it pins: %v", pin, phase, rule.Reclaim, pinned)
			}
			if byRelay := rule.Cancel == CancelByRelay || rule.Cancel == CancelByRelayAfterGrace; byRelay != (phase == PhaseStream) || (rule.Cancel == CancelNothing) != (phase == PhaseBetween) {
				t.Errorf("pin %d, phase %d: cancel %d", pin, phase, rule.Cancel)
			}
			if both := rule.Cancel == CancelBoth || rule.Cancel == CancelPrefillFirst; both && !concurrent {
				t.Errorf("pin %d, phase %d: cancels a second leg that there is not", pin, phase)
			}
		}
	}
}

// TestAbortRuleOfEachFamily checks the rule of each family's legs in every phase.
func TestAbortRuleOfEachFamily(t *testing.T) {
	type row = [phases]CancelRule
	unpinned := row{CancelNow, CancelNothing, CancelNow, CancelNow, CancelByRelay}
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
		{"sglang", false, unpinned}, {"sglang", true, room},
		{"lmcache", false, unpinned}, {"storage", false, unpinned}, {"orchestrated", false, unpinned},
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
			if got := rules[pinOf(phase, &traits, k.concurrent, true)][phase].Cancel; got != k.want[phase] {
				t.Errorf("%s, concurrent %v, phase %d: %d, want %d", k.family, k.concurrent, phase, got, k.want[phase])
			}
		}
		// Decode without a handle runs the whole request and pins nothing.
		if got := pinOf(PhaseDecode, &traits, false, false); got != pinNothing {
			t.Errorf("%s without a handle: pin %d", k.family, got)
		}
	}
}

// TestStreamRules checks what the row of PhaseStream makes of a stream that ends between its head and
// its first event: for how long the engine's connection stays open, and whether the blocks of a handle
// are released. Every pin has a row.
func TestStreamRules(t *testing.T) {
	const delay = 3 * time.Second
	for pin, want := range map[kvPin]struct {
		grace, releasable time.Duration // grace of the connection without and with a side channel
		ended             kvState       // of blocks that decode was sent
	}{
		pinNothing:  {0, 0, kvFetched},
		pinLeased:   {delay, maxReleaseWait, kvReclaimed},
		pinRoom:     {0, 0, kvFetched},
		pinTransfer: {delay, maxReleaseWait, kvFetched},
	} {
		rule := rules[pin][PhaseStream]
		if got := rule.CloseGrace(delay, false); got != want.grace {
			t.Errorf("pin %d: the connection stays open for %s, want %s", pin, got, want.grace)
		}
		if got := rule.CloseGrace(delay, true); got != want.releasable {
			t.Errorf("pin %d, releasable: the connection stays open for %s, want %s", pin, got, want.releasable)
		}
		request := KV{state: kvSent}
		stream := request.HandOver(rule.Reclaim, 0)
		if stream.GiveUp(); stream.state != want.ended {
			t.Errorf("pin %d: blocks end in state %d, want %d", pin, stream.state, want.ended)
		}
	}
	for pin := range kvPins {
		for phase := range phases {
			if rule := rules[pin][phase]; phase != PhaseStream && rule.CloseGrace(delay, false) != 0 {
				t.Errorf("pin %d, phase %d: the relay waits, but has no stream", pin, phase)
			}
		}
	}
}
