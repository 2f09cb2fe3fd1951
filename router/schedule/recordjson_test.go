package schedule

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
)

// TestRecordFormerMembers: a record has the names of the previous release too, and is read with
// either set of names.
func TestRecordFormerMembers(t *testing.T) {
	rec := Record{
		RequestID: "r", Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Dropped: 2, LostNotes: 3,
		Decisions: []Decision{{Leg: "decode", Shown: []Candidate{{Rank: "a/0", Approx: true}, {Rank: "b/0", InFlight: true}}}},
		Joint:     []JointDecision{{Plan: "remote", Reason: ReasonFaster, Remote: Remote{TransferRate: 0.5}}},
	}
	body, err := json.Marshal(rec)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{ // current to former
		"started": "begun", "decisions_dropped": "decisions_not_kept", "notes_dropped": "notes_not_kept",
		"joint_decisions": "pairs", "transfer_ms_per_token": "pair_ms_per_token", "reason": "why",
		"overlap_approximate": "overlap_guessed", "overlap_in_flight": "overlap_awaited",
	}
	current, former := string(body), string(body)
	for now, then := range names {
		for _, name := range []string{now, then} {
			if !strings.Contains(string(body), `"`+name+`":`) {
				t.Errorf("no %s in %s", name, body)
			}
		}
		current = strings.ReplaceAll(current, `"`+then+`":`, `"removed":`)
		former = strings.ReplaceAll(former, `"`+now+`":`, `"removed":`)
	}
	for _, text := range []string{string(body), current, former} {
		var got Record
		if err := json.Unmarshal([]byte(text), &got); err != nil || !reflect.DeepEqual(got, rec) {
			t.Errorf("%v\n%s\nis read as %+v", err, text, got)
		}
	}
}
