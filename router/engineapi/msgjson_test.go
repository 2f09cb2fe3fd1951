package engineapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/membudget"
)

// fromPacked returns an allocator that leases from a budget.
func fromPacked(b *membudget.Budget) allocator {
	return func(n int) (membudget.Lease, bool) { return membudget.Default.Lease(b, n) }
}

// jsonOf returns one msgpack value as JSON.
func jsonOf(t testing.TB, packed []byte) string {
	t.Helper()
	var made jsonWriter
	defer made.mem.Release()
	rest, err := made.read(packed, fromPacked(membudget.NewBudget(math.MaxInt64)))
	if err != nil || len(rest) > 0 {
		t.Errorf("%x: %v, %d bytes left", packed, err, len(rest))
	}
	return string(made.dst)
}

// nestedMsgpack returns nested arrays.
func nestedMsgpack(n int) any {
	v := any([]any{})
	for range n {
		v = []any{v}
	}
	return v
}

// TestJSONIsCounted: the JSON of a request lies in memory leased from the budget beforehand.
// The request is rejected when the budget is too small, and all memory is returned.
func TestJSONIsCounted(t *testing.T) {
	many := func(v any, n int) any {
		list := make([]any, n)
		for i := range list {
			list[i] = v
		}
		return list
	}
	for name, v := range map[string]any{
		"control characters": strings.Repeat("\x01", 50_000),
		"quotes":             strings.Repeat(`"`, 50_000),
		"plain text":         strings.Repeat("word ", 20_000),
		"short texts":        many("\x02\x03", 20_000),
		"keys":               map[string]any{strings.Repeat("\x1f", 30_000): 1.5, strings.Repeat("\x1e", 30_000): nil},
		"false":              many(false, 60_000),
		"null":               many(nil, 60_000),
		"ids":                many(uint64(1234567), 40_000),
		"small ids":          many(int64(7), 60_000),
		"floats":             many(-2.2250738585072014e-308, 20_000),
		"integers":           many(int64(math.MinInt64), 20_000),
		"nesting":            many(nestedMsgpack(50), 1000),
		"nothing":            many(map[string]any{}, 30_000),
	} {
		t.Run(name, func(t *testing.T) {
			packed, err := msgp.AppendIntf(nil, v)
			if err != nil {
				t.Fatal(err)
			}
			budget := membudget.NewBudget(math.MaxInt64)
			var made jsonWriter
			rest, err := made.read(packed, fromPacked(budget))
			if err != nil || len(rest) > 0 {
				t.Fatalf("%v, %d bytes left", err, len(rest))
			}
			if mem := made.mem.Bytes(); &made.dst[0] != &mem[0] || int64(cap(made.dst)) > budget.Used() {
				t.Errorf("%d bytes of JSON for %d are not where they were counted, of which there are %d", len(made.dst), len(packed), budget.Used())
			}
			var got, want any
			js, _ := json.Marshal(v)
			if err := json.Unmarshal(made.dst, &got); err != nil {
				t.Fatal(err)
			}
			if _ = json.Unmarshal(js, &want); !reflect.DeepEqual(got, want) {
				t.Error("the JSON says something else")
			}
			size, peak := int64(len(made.dst)), budget.Peak()
			if made.mem.Release(); budget.Used() != 0 {
				t.Errorf("%d bytes were not given back", budget.Used())
			}
			for _, limit := range []int64{0, 4 << 10, size / 2, size - 1} {
				budget := membudget.NewBudget(limit)
				var made jsonWriter
				if _, err := made.read(packed, fromPacked(budget)); !errors.Is(err, errBudgetExhausted) {
					t.Errorf("%d bytes of JSON with %d in the budget: %v", size, limit, err)
				}
				if made.mem.Release(); budget.Used() != 0 || budget.Peak() > limit {
					t.Errorf("%d of %d were taken, %d kept", budget.Peak(), limit, budget.Used())
				}
			}
			if peak > 4*max(size, int64(len(packed)))+64<<10 {
				t.Errorf("%d bytes were taken for %d of JSON", peak, size)
			}
		})
	}
}

// TestMaxBodySize: in every dialect the engine's body is at most as long as maxBodySize.
func TestMaxBodySize(t *testing.T) {
	schema := `{"json":{"type":"object","properties":{` + strings.Repeat(`"a":{"enum":["","",""]},`, 500) + `"b":{}}}}`
	all := `{"model":"m","token_ids":[1,2,3],"eos_token_ids":[2],"stop_conditions":{"max_tokens":5,"stop":["x"],"stop_token_ids":[7],"stop_token_ids_hidden":[8],"min_tokens":1,"ignore_eos":false},
		"sampling_options":{"n":1,"presence_penalty":0,"frequency_penalty":0,"repetition_penalty":1,"temperature":0,"top_p":1,"top_k":-1,"min_p":0,"seed":1,"guided_decoding":` + schema + `},
		"output_options":{"logprobs":1,"skip_special_tokens":true},"routing":{"cache_salt":"s","priority":1,"lora_name":"l"},"extra_args":{"a":1}}`
	for d := range engineDialect(len(endpoints)) {
		for _, body := range []string{`{"token_ids":[1]}`, all} {
			if d == trtllm {
				body = strings.Replace(body, `"cache_salt":"s",`, "", 1)
			}
			r := new(request)
			if err := r.parse([]byte(body)); err != nil {
				t.Fatal(err)
			}
			out, err := r.appendBody(nil, modelPool{dialect: d, maxLen: 100})
			if err != nil {
				t.Fatalf("%s: %v", endpoints[d].Path, err)
			}
			if most := r.maxBodySize(len(body)); len(out) > most {
				t.Errorf("%s: %d bytes became %d, over %d", endpoints[d].Path, len(body), len(out), most)
			}
			if !json.Valid(out) {
				t.Errorf("%s", out)
			}
		}
	}
}

func BenchmarkJSON(b *testing.B) {
	for _, n := range []int{64, 4096} {
		packed := msgp.AppendArrayHeader(nil, uint32(n))
		for i := range uint32(n) {
			packed = msgp.AppendUint32(packed, i*7919%128_000)
		}
		b.Run(fmt.Sprintf("ids=%d", n), func(b *testing.B) {
			allocate := fromPacked(membudget.NewBudget(math.MaxInt64))
			b.ReportAllocs()
			for b.Loop() {
				var made jsonWriter
				if _, err := made.read(packed, allocate); err != nil || !bytes.HasSuffix(made.dst, []byte("]")) {
					b.Fatal(err)
				}
				made.mem.Release()
			}
		})
	}
}
