package front

import (
	"runtime"
	"strings"
	"testing"

	"sluice/dataplane/jsonscan"
)

// oneModel is the principal of a key that may use only model "m".
type oneModel struct{ goodKey }

func (oneModel) Allows(model string) bool { return model == "m" }

// The memory of a list of adapters, 60 times the list's size, is counted against the budget.
func TestAdapterListTakesNoMemory(t *testing.T) {
	for name, principal := range map[string]Principal{"every model": goodKey{}, "one model": oneModel{}} {
		for _, member := range []string{"lora_path", "lora_id"} {
			body := `{"model":"m","` + member + `":[` + strings.Repeat(`"m",null,`, 100_000) + `"m"]}`
			x := new(httpExchange)
			x.Principal = principal
			if err := x.Doc.Scan([]byte(body), jsonscan.Limits{}); err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			ok := x.authorizeModel()
			runtime.ReadMemStats(&after)
			if took := after.TotalAlloc - before.TotalAlloc; !ok || took > 64<<10 {
				t.Errorf("%s, %s: authorized %v with %d bytes of memory for a body of %d", name, member, ok, took, len(body))
			}
		}
	}
}
