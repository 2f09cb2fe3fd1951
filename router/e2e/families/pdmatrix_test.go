package families

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/e2e/harness"
)

// matrixCase is one column of the matrix: a fault or event that the test applies to every family.
// The text of a cell is the observed result, so the document describes what the code does.
type matrixCase struct {
	name string
	run  func(*harness.MatrixFleet, *testing.T) string
}

var matrixColumns = allMatrixCases()

func allMatrixCases() (cases []matrixCase) {
	add := func(name string, run func(*harness.MatrixFleet, *testing.T) string) {
		cases = append(cases, matrixCase{name, run})
	}
	for _, c := range []struct{ name, kind, extra string }{
		{"", "chat", ""},
		{"n = 2, ", "chat", `,"n":2`},
		{"two prompts, ", "batch", ""},
		{"two prompts, n = 2, ", "batch", `,"n":2`},
	} {
		for _, s := range harness.Shapes {
			add(c.name+s.Name, func(f *harness.MatrixFleet, t *testing.T) string { return f.CheckAnswers(t, c.kind, c.extra+s.Extra) })
		}
	}
	for _, s := range harness.Shapes {
		add("client leaves in prefill, "+s.Name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.Abort(t, s.Extra, harness.AbortPoint{Faulted: f.Prefills, Fault: sim.Fault{Kind: sim.Stall}, Receivers: f.Prefills})
		})
		add("… while prefill answers, "+s.Name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.Abort(t, s.Extra, harness.AbortPoint{Faulted: f.Prefills, Receivers: f.Prefills, Fault: sim.Fault{Phase: "answer"}, Answering: true})
		})
		add("… in the hand-over, "+s.Name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.Abort(t, s.Extra, f.HandoverPoint())
		})
		add("… in decode, "+s.Name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.Abort(t, s.Extra, harness.AbortPoint{Faulted: f.Decodes, Fault: sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond}, Receivers: f.Decodes, FaultHolds: true, Decoding: true})
		})
	}
	for _, s := range harness.Shapes {
		add("prefill fails before its head, "+s.Name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.FailsOver(t, f.Prefills[0], sim.Fault{Kind: sim.Status}, s.Extra)
		})
		add("… within its answer, "+s.Name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.FailsOver(t, f.Prefills[0], sim.Fault{Kind: sim.Truncate, Phase: "body"}, s.Extra)
		})
		add("decode fails before its head, "+s.Name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.FailsOver(t, f.Decodes[0], sim.Fault{Kind: sim.Status}, s.Extra)
		})
	}
	const fixed = `,"seed":7,"stream":true` // a second sampling run differs even with the seed, so such a stream cannot migrate
	for _, c := range []struct {
		name, extra string
		fault       sim.Fault
	}{
		{"decode's stream begins with an error", `,"stream":true`, sim.Fault{Kind: sim.StreamFail}},
		{"… with an error, and cannot move", fixed, sim.Fault{Kind: sim.StreamFail}},
		{"… with its role and an error, and cannot move", fixed, sim.Fault{Kind: sim.StreamFail, Phase: "role"}},
		{"… ends with its head, and cannot move", fixed, sim.Fault{Kind: sim.Truncate, Phase: "body"}},
		{"decode's stream begins with an error, n = 2", `,"n":2,"stream":true`, sim.Fault{Kind: sim.StreamFail}},
	} {
		add(c.name, func(f *harness.MatrixFleet, t *testing.T) string {
			return f.FailsOver(t, f.Decodes[0], c.fault, c.extra)
		})
	}
	add("decode fails after first tokens, stream", func(f *harness.MatrixFleet, t *testing.T) string {
		return f.FailsOver(t, f.Decodes[0], sim.Fault{Kind: sim.Truncate, After: 4}, `,"stream":true`)
	})
	add("… within its answer, not streamed", func(f *harness.MatrixFleet, t *testing.T) string {
		return f.FailsOver(t, f.Decodes[0], sim.Fault{Kind: sim.Truncate, Phase: "body"}, "")
	})
	add("decode fails after first tokens, n = 2, stream", func(f *harness.MatrixFleet, t *testing.T) string {
		return f.FailsOver(t, f.Decodes[0], sim.Fault{Kind: sim.Truncate, After: 6}, `,"n":2,"stream":true`)
	})
	return cases
}

const matrixDoc = "../../../docs/pd-matrix.md"

// TestPDMatrix runs every family through every case on simulated engines, and compares the results
// with docs/pd-matrix.md.
func TestPDMatrix(t *testing.T) {
	t.Parallel()
	rows := make([][]string, len(harness.MatrixFamilies))
	t.Run("families", func(t *testing.T) { // in parallel, because some cases wait for long
		for i := range harness.MatrixFamilies {
			fam := &harness.MatrixFamilies[i]
			rows[i] = make([]string, len(matrixColumns))
			t.Run(fam.Name+fam.Variant, func(t *testing.T) {
				t.Parallel()
				f := harness.StartMatrixFleet(t, fam)
				for k, c := range matrixColumns {
					t.Run(strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) { rows[i][k] = c.run(f, t) })
				}
			})
		}
	})
	for _, row := range rows {
		if t.Failed() || slices.Contains(row, "") { // -run selected only some cases
			return
		}
	}
	got := matrixPage(rows)
	if *harness.Rewrite {
		if err := os.WriteFile(matrixDoc, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(matrixDoc)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("docs/pd-matrix.md differs from this run (go test ./router/e2e/families -run TestPDMatrix -rewrite updates it):\n%s", got)
	}
}

// matrixPage returns the document. It has a column for each family, because there are more cases
// than families.
func matrixPage(rows [][]string) string {
	var b strings.Builder
	b.WriteString(inBackticks(`# P/D behaviour by family

This page shows, family by family, what happens to a request when it succeeds, when its client leaves, and when an engine fails.
A test writes it (~go test ./router/e2e/families -run TestPDMatrix -rewrite~) with two prefill engines, two decode engines, all simulated, and a router in front of them, one request at a time.
Every answer called right equals that of an undisturbed engine.
The rules for a client that leaves are one table, ~rules~ in ~router/pd/abort/rules.go~; [ARCHITECTURE.md](../ARCHITECTURE.md#a-client-that-disconnects) describes how they are applied.

|`))
	for i := range harness.MatrixFamilies {
		b.WriteString(" | " + harness.MatrixFamilies[i].Name + harness.MatrixFamilies[i].Variant)
	}
	b.WriteString(" |\n|---" + strings.Repeat("|---", len(harness.MatrixFamilies)) + "|\n")
	for k, c := range matrixColumns {
		b.WriteString("| " + c.name)
		for i := range rows {
			b.WriteString(" | " + rows[i][k])
		}
		b.WriteString(" |\n")
	}
	b.WriteString(inBackticks(`
| word | meaning |
|---|---|
| both legs | prefill on one engine, its KV to another, which computed nothing of the prompt |
| declined, both legs | the same, after decode, which was asked first, held too little |
| decode alone | the family cannot hand this request over |
| freed at once | every block, room, lease and reservation was released, and none by a timeout; the leases of these engines are 30 s and longer |
| run again | the client saw a whole right answer, from a second pair or decode engine |
| unseen | the same, or decode had the KV already and went on |
| goes on elsewhere | a whole right answer whose first tokens are the first engine's ([migration.md](migration.md)) |
| error event | the stream ends with an error in the API's form |

**While prefill answers**: the engine has finished and keeps the blocks, and its answer, the only thing that names them, is on its way.
The router waits for it, for a second and, where the prefill is expected to take up to two seconds more, for that time as well.
Then it closes its sending side.

**A decode that is not streamed** shows no sign of life before its end.
The router cancels it when ~pd.abort_delay~ has passed since it was sent (1 s here) and its engine has answered two probes, one after the other, that were sent after it.
A decode that is delayed for longer, in an engine that answers, leaves its blocks to the lease, or to the side channel where that releases.
From vLLM 0.21 on such a decode may run on for ~pd.abandoned_decode_timeout~ before that (0 here): if it is cancelled, its engine notifies prefill a second time of blocks that it has read, and prefill logs an error.

**A stream** is cancelled after its first event, or ~pd.abort_delay~ after its head: vLLM sends the head before its engine has the request.
`))
	return b.String()
}

// inBackticks replaces each tilde of text by a backtick, which a raw string cannot contain.
func inBackticks(text string) string { return strings.ReplaceAll(text, "~", "`") }
