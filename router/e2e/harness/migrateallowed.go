package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"sluice/bench/sim"
)

// SpliceRounds returns the prompts of the requests that resumed a stream of several choices, in
// the order of the requests.
func (m *MigrationFleet) SpliceRounds(t *testing.T) (rounds [][][]uint32) {
	t.Helper()
	var recs []sim.Record
	for _, e := range m.Engines {
		for _, r := range GenerateRequests(e) {
			if bytes.Contains(r.Body, []byte(`"prompt":[`)) {
				recs = append(recs, r)
			}
		}
	}
	slices.SortFunc(recs, func(a, b sim.Record) int {
		return strings.Compare(a.Header("X-Request-Id"), b.Header("X-Request-Id"))
	})
	for _, r := range recs {
		var many struct{ Prompt [][]uint32 }
		var one struct{ Prompt []uint32 }
		if json.Unmarshal(r.Body, &many) != nil {
			if err := json.Unmarshal(r.Body, &one); err != nil {
				t.Fatalf("%v in %s", err, r.Body)
			}
			many.Prompt = [][]uint32{one.Prompt}
		}
		if bytes.Contains(r.Body, []byte(`"n":`)) {
			t.Errorf("an engine was asked for several again: %s", r.Body)
		}
		rounds = append(rounds, many.Prompt)
	}
	return rounds
}

// Continuation returns the text that the reference engine generates after a prompt of ids.
func (m *MigrationFleet) Continuation(t *testing.T, ids []uint32, most int, like string) string {
	t.Helper()
	list, _ := json.Marshal(ids)
	body := fmt.Sprintf(`{"model":"sim","prompt":%s,"max_tokens":%d,"ignore_eos":%v}`, list, most, strings.Contains(like, "ignore_eos"))
	a := Post(t, m.Reference.URL()+"/v1/completions", body)
	if a.Status != http.StatusOK {
		t.Fatalf("%d %s", a.Status, a.Body)
	}
	return a.Text(t)
}
