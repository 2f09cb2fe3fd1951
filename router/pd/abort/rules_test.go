package abort

import (
	"os"
	"strings"
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

// TestRuleTable checks that the table in ARCHITECTURE.md has the rules.
func TestRuleTable(t *testing.T) {
	text, err := os.ReadFile("../../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	cancels := map[CancelRule]string{
		CancelNothing: "CancelNothing", CancelNow: "CancelNow", CancelBoth: "CancelBoth", CancelAfterAnswer: "CancelAfterAnswer", CancelAfterAdmission: "CancelAfterAdmission",
		CancelPrefillFirst: "CancelPrefillFirst", CancelByRelay: "CancelByRelay", CancelByRelayAfterGrace: "CancelByRelayAfterGrace",
	}
	reclaims := map[ReclaimRule]string{ReclaimNothing: "ReclaimNothing", ReclaimByRelease: "ReclaimByRelease", ReclaimByDecode: "ReclaimByDecode", ReclaimAfterGrace: "ReclaimAfterGrace"}
	for class, name := range [legClasses]string{classUnleased: "classUnleased", classLeased: "classLeased", classRoom: "classRoom", classTransfer: "classTransfer"} {
		want := "| `" + name + "` |"
		for _, rule := range rules[class] {
			if rule == (Rule{}) {
				want += " – |"
			} else {
				want += " `" + cancels[rule.Cancel] + "`, `" + reclaims[rule.Reclaim] + "` |"
			}
		}
		if !strings.Contains(string(text), want+"\n") {
			t.Errorf("ARCHITECTURE.md lacks the row %s", want)
		}
	}
}

// familyLegs are the legs of each family: run one after the other or at once.
var familyLegs = []struct {
	family     string
	concurrent bool
	class      legClass
}{
	{"nixl", false, classLeased}, {"trtllm", false, classLeased},
	{"nixl-push", false, classLeased}, {"nixl-push", true, classTransfer},
	{"mooncake", false, classLeased}, {"mooncake", true, classTransfer},
	{"sglang", false, classUnleased}, {"sglang", true, classRoom},
	{"lmcache", false, classUnleased}, {"storage", false, classUnleased}, {"orchestrated", false, classUnleased},
}

// TestAbortRuleOfEachFamily checks the rule of each family's legs in every phase: what is cancelled,
// when, and how the blocks are freed. No family is missing.
func TestAbortRuleOfEachFamily(t *testing.T) {
	want := [legClasses][phases]Rule{
		classUnleased: {
			PhasePrefill: {CancelNow, ReclaimNothing},
			PhaseBetween: {CancelNothing, ReclaimNothing},
			PhaseDecode:  {CancelNow, ReclaimNothing},
			PhaseAnswer:  {CancelNow, ReclaimNothing},
			PhaseStream:  {CancelByRelay, ReclaimNothing},
		},
		classLeased: {
			PhasePrefill: {CancelAfterAnswer, ReclaimByRelease},
			PhaseBetween: {CancelNothing, ReclaimByRelease},
			PhaseDecode:  {CancelAfterAdmission, ReclaimByDecode},
			PhaseAnswer:  {CancelNow, ReclaimAfterGrace},
			PhaseStream:  {CancelByRelayAfterGrace, ReclaimAfterGrace},
		},
		classRoom: {
			PhaseDecode: {CancelBoth, ReclaimNothing},
			PhaseAnswer: {CancelBoth, ReclaimNothing},
			PhaseStream: {CancelByRelay, ReclaimNothing},
		},
		classTransfer: {
			PhaseDecode: {CancelAfterAdmission, ReclaimByDecode},
			PhaseAnswer: {CancelPrefillFirst, ReclaimByDecode},
			PhaseStream: {CancelByRelayAfterGrace, ReclaimByDecode},
		},
	}
	seen := map[string]bool{}
	for _, k := range familyLegs {
		seen[k.family] = true
		f, err := family.ByName(k.family)
		if err != nil {
			t.Fatal(err)
		}
		traits := f.Traits()
		for phase := range phases {
			if got := RuleOf(phase, &traits, k.concurrent, true); got != want[k.class][phase] {
				t.Errorf("%s, concurrent %v, phase %d: %v, want %v", k.family, k.concurrent, phase, got, want[k.class][phase])
			}
			// Legs without a handle run the whole request and lease nothing.
			if got := RuleOf(phase, &traits, false, false); got != want[classUnleased][phase] {
				t.Errorf("%s without a handle, phase %d: %v, want %v", k.family, phase, got, want[classUnleased][phase])
			}
		}
	}
	for _, name := range family.Names() {
		if !seen[name] {
			t.Errorf("no legs of family %s", name)
		}
	}
}

// TestReclaim checks what every rule of the table does to the blocks of a handle in every state, whether
// the decode engine has received its leg or not.
func TestReclaim(t *testing.T) {
	const none, held, sent, fetched, reclaimed = kvNone, kvHeld, kvSent, kvFetched, kvReclaimed
	for _, c := range []struct {
		rule     ReclaimRule
		received bool
		want     [kvStates]kvState
	}{
		{ReclaimNothing, false, [kvStates]kvState{none, fetched, fetched, fetched, reclaimed}},
		{ReclaimNothing, true, [kvStates]kvState{none, fetched, fetched, fetched, reclaimed}},
		// The caller releases them.
		{ReclaimByRelease, false, [kvStates]kvState{none, held, sent, fetched, reclaimed}},
		{ReclaimByRelease, true, [kvStates]kvState{none, held, sent, fetched, reclaimed}},
		{ReclaimByDecode, false, [kvStates]kvState{none, reclaimed, reclaimed, fetched, reclaimed}},
		{ReclaimByDecode, true, [kvStates]kvState{none, fetched, fetched, fetched, reclaimed}},
		{ReclaimAfterGrace, false, [kvStates]kvState{none, reclaimed, reclaimed, fetched, reclaimed}},
		{ReclaimAfterGrace, true, [kvStates]kvState{none, reclaimed, reclaimed, fetched, reclaimed}},
	} {
		for state := range kvStates {
			h := KV{state: state}
			if h.Reclaim(c.rule, c.received, time.Second); h.state != c.want[state] {
				t.Errorf("rule %d, received %v: state %d becomes %d, want %d", c.rule, c.received, state, h.state, c.want[state])
			}
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
		stream := request.TakeForStream(rule.Reclaim, 0)
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
