package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/textgen"
	"sluice/bench/testwait"
)

func FuzzTokenizer(f *testing.F) {
	for _, s := range []string{"", "Hello, world", "<|im_start|>user\nHi<|im_end|>\n", "<|im_<pad>", "Grüße \x00\xff 🙂", "a  b\n\n c\t1234567"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ids := textgen.Tokenize(s)
		if got := textgen.Detokenize(ids); got != s {
			t.Fatalf("%q becomes %q", s, got)
		}
		for _, id := range ids {
			if int(id) >= textgen.VocabSize() {
				t.Fatalf("id %d is outside the vocabulary of %d", id, textgen.VocabSize())
			}
		}
	})
}

// FuzzIDList: the reader of token id arrays takes what encoding/json takes.
func FuzzIDList(f *testing.F) {
	for _, s := range []string{"[]", "[1,2,3]", " [ 1 , 4294967295 ] ", "[4294967296]", "[-1]", "[1.5]", "[[1]]", `["a"]`, "[1e3]", "null"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if !json.Valid([]byte(s)) {
			return // it only ever sees members of a decoded body
		}
		var want []uint32
		err := json.Unmarshal([]byte(s), &want)
		got, ok := api.ParseIDs([]byte(s))
		if ok != (err == nil && want != nil) && !strings.Contains(s, "null") {
			t.Fatalf("%q: taken %v, encoding/json says %v", s, ok, err)
		}
		if ok && fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("%q: %v, want %v", s, got, want)
		}
	})
}

// TestTokenizeAgrees: /tokenize gives the prompt the chat endpoint computes.
func TestTokenizeAgrees(t *testing.T) {
	e := fastOptions(t, Options{})
	msgs := `"messages":[{"role":"system","content":"You know things."},{"role":"user","content":"What is a token?"}],` + volatileMetrics
	a := post(t, e, "/tokenize", `{`+msgs+`}`)
	b := post(t, e, "/v1/chat/completions", `{`+msgs+`,"max_tokens":1,"return_token_ids":true}`)
	if fmt.Sprint(a.json["tokens"]) != fmt.Sprint(b.json["prompt_token_ids"]) || a.json["count"].(float64) < 20 {
		t.Errorf("tokenize %v\nchat %v", a.json["tokens"], b.json["prompt_token_ids"])
	}
}

// TestMultiTurnCache: the prompt of the next turn begins with the tokens of the turn
// before and of the answer, so prefix caching works over a conversation.
func TestMultiTurnCache(t *testing.T) {
	e := fastOptions(t, Options{BlockSize: 4})
	first := `{"role":"user","content":"Tell me about rivers"}`
	a := post(t, e, "/v1/chat/completions", `{"messages":[`+first+`],"max_tokens":40,"ignore_eos":true,"return_token_ids":true}`)
	text := a.choice()["message"].(map[string]any)["content"].(string)
	next := post(t, e, "/v1/chat/completions", fmt.Sprintf(`{"messages":[%s,{"role":"assistant","content":%q},{"role":"user","content":"More"}],"max_tokens":1,"return_token_ids":true}`, first, text))
	old := fmt.Sprint(append(a.json["prompt_token_ids"].([]any), a.choice()["token_ids"].([]any)...))
	if now := fmt.Sprint(next.json["prompt_token_ids"]); !strings.HasPrefix(now, strings.TrimSuffix(old, "]")) {
		t.Errorf("second turn %s\ndoes not begin with %s", now, old)
	}
	cached := next.json["usage"].(map[string]any)["prompt_tokens_details"].(map[string]any)["cached_tokens"].(float64)
	if all := float64(strings.Count(old, " ") + 1); cached < all-8 {
		t.Errorf("%v of %v tokens cached", cached, all)
	}
}

// TestDeterminism: the same output on every instance, rank and path, a different
// one for another seed, model or choice, and a continuation that is one.
func TestDeterminism(t *testing.T) {
	a, b := fastOptions(t, Options{}), fastOptions(t, Options{Ranks: 2, Blocks: 64, BlockSize: 8, Role: "decode"})
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		prompt := idPrompt(1+rng.IntN(200), rng.IntN(1000))
		ask := func(e *Engine, prompt string, tokens int, more string) []uint32 {
			r := post(t, e, "/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"return_token_ids":true%s}`, prompt, tokens, more))
			if r.status != 200 {
				t.Fatalf("%d %s", r.status, r.body)
			}
			return r.ids()
		}
		whole := ask(a, prompt, 24, "")
		if got := ask(b, prompt, 24, ""); fmt.Sprint(got) != fmt.Sprint(whole) {
			t.Fatalf("two instances: %v and %v", whole, got)
		}
		if got := ask(b, prompt, 24, `,"seed":7`); fmt.Sprint(got) == fmt.Sprint(whole) {
			t.Fatalf("seed makes no difference: %v", got)
		}
		cut := 1 + rng.IntN(22)
		longer := strings.TrimSuffix(prompt, "]")
		for _, id := range whole[:cut] {
			longer += fmt.Sprint(",", id)
		}
		if got := ask(b, longer+"]", 24-cut, ""); fmt.Sprint(got) != fmt.Sprint(whole[cut:]) {
			t.Fatalf("continued after %d: %v, want %v", cut, got, whole[cut:])
		}
	}
	r := post(t, a, "/v1/completions", `{"prompt":[300],"n":2,"max_tokens":16,"ignore_eos":true}`)
	list := r.json["choices"].([]any)
	if list[0].(map[string]any)["text"] == list[1].(map[string]any)["text"] {
		t.Errorf("choices are equal: %s", r.body)
	}
}

// TestFinishReasons: outputs end by themselves, not before min_tokens, and not at all with ignore_eos.
func TestFinishReasons(t *testing.T) {
	e := fastOptions(t, Options{})
	stopped, tokens := 0, 0
	for i := range 40 {
		a := post(t, e, "/v1/completions", fmt.Sprintf(`{"prompt":[%d],"max_tokens":2000}`, 300+i))
		if a.choice()["finish_reason"] == "stop" {
			stopped++
		}
		tokens += int(a.json["usage"].(map[string]any)["completion_tokens"].(float64))
		if strings.Contains(a.text(), "<|") {
			t.Errorf("special tokens in the text: %q", a.text())
		}
	}
	if stopped < 38 || tokens/40 < 20 || tokens/40 > 400 {
		t.Errorf("%d of 40 ended by themselves, %d tokens on average", stopped, tokens/40)
	}
	for i := range 20 {
		a := post(t, e, "/v1/completions", fmt.Sprintf(`{"prompt":[%d],"max_tokens":600,"min_tokens":300,"return_token_ids":true}`, 300+i))
		if n := len(a.ids()); n < 300 {
			t.Errorf("%d tokens in spite of min_tokens 300", n)
		}
	}
}

// TestPreemption: more work than blocks; all of it is done, with the same output.
func TestPreemption(t *testing.T) {
	small, big := fastOptions(t, Options{Blocks: 24, BlockSize: 4}), fastOptions(t, Options{})
	const n = 12
	type result struct {
		i   int
		a   answer
		err error
	}
	results := make(chan result, n)
	body := func(i int) string {
		return fmt.Sprintf(`{"prompt":%s,"max_tokens":40,"ignore_eos":true,"return_token_ids":true}`, idPrompt(20, i))
	}
	for i := range n {
		go func() {
			a, err := tryPost(small.URL()+"/v1/completions", body(i))
			results <- result{i, a, err}
		}()
	}
	for range n {
		r := <-results
		if r.err != nil || r.a.status != 200 {
			t.Fatalf("%v %d %s", r.err, r.a.status, r.a.body)
		}
		if want := post(t, big, "/v1/completions", body(r.i)); fmt.Sprint(want.ids()) != fmt.Sprint(r.a.ids()) {
			t.Errorf("request %d: %v, want %v", r.i, r.a.ids(), want.ids())
		}
	}
	s := small.Stats().Sum()
	if s.BlocksFree != s.BlocksTotal {
		t.Errorf("blocks are lost: %+v", s)
	}
	t.Logf("%d preemptions", s.Preemptions)
}

// TestPriorityScheduling: one sequence runs at a time, and of those that wait the one with the
// lowest priority value runs next; with fcfs the value is ignored.
func TestPriorityScheduling(t *testing.T) {
	for policy, want := range map[string]string{"priority": "high mid low", "fcfs": "low mid high"} {
		t.Run(policy, func(t *testing.T) {
			e, err := Start(context.Background(), Options{Scheduling: policy, MaxSeqs: 1, LogBlocks: true, Speed: 4})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			ctx, leave := context.WithCancel(context.Background())
			defer leave()
			var wg sync.WaitGroup
			send := func(ctx context.Context, id string, priority, tokens int) {
				before := e.Stats().Sum()
				body := fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"priority":%d}`, idPrompt(20, priority+50), tokens, priority)
				req, err := http.NewRequestWithContext(ctx, "POST", e.URL()+"/v1/completions", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("X-Request-Id", id)
				wg.Go(func() {
					resp, err := http.DefaultClient.Do(req)
					if err != nil {
						if ctx.Err() == nil {
							t.Error(err)
						}
						return
					}
					defer resp.Body.Close()
					if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
						t.Errorf("%s: status %d, %v: %s", id, resp.StatusCode, err, text)
					}
				})
				testwait.Until(t, "the engine has "+id, func() bool {
					s := e.Stats().Sum()
					return s.Running+s.Waiting > before.Running+before.Waiting
				})
			}
			send(ctx, "first", 0, 50_000) // runs while the others arrive, then leaves
			for _, r := range []struct {
				id       string
				priority int
			}{{"low", 9}, {"mid", 0}, {"high", -3}} {
				send(context.Background(), r.id, r.priority, 3)
			}
			leave()
			wg.Wait()
			got := []string{"low", "mid", "high"}
			var ended map[string]time.Time
			testwait.Until(t, "the blocks of all are released", func() bool {
				ended = e.BlockReleaseTimes()
				return !slices.ContainsFunc(got, func(id string) bool { return ended[id].IsZero() })
			})
			slices.SortFunc(got, func(a, b string) int { return ended[a].Compare(ended[b]) })
			if s := strings.Join(got, " "); s != want {
				t.Errorf("ended in the order %s; want %s: %v", s, want, ended)
			}
		})
	}
}

// TestPriorityPreemption: when blocks run out, the sequence with the highest priority value gives
// up its own, wherever it is in the batch, and every output is that of an engine with space.
func TestPriorityPreemption(t *testing.T) {
	small, big := fastOptions(t, Options{Blocks: 24, BlockSize: 4, Scheduling: "priority", Speed: 10}), fastOptions(t, Options{})
	const n = 12
	body := func(i int) string {
		return fmt.Sprintf(`{"prompt":%s,"max_tokens":60,"ignore_eos":true,"return_token_ids":true,"priority":%d}`, idPrompt(20, i), (i*7)%5)
	}
	answers, errs := make([]answer, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { answers[i], errs[i] = tryPost(small.URL()+"/v1/completions", body(i)) })
	}
	wg.Wait()
	for i := range n {
		if errs[i] != nil || answers[i].status != 200 {
			t.Fatalf("%v %d %s", errs[i], answers[i].status, answers[i].body)
		}
		if want := post(t, big, "/v1/completions", body(i)); fmt.Sprint(want.ids()) != fmt.Sprint(answers[i].ids()) {
			t.Errorf("request %d: %v, want %v", i, answers[i].ids(), want.ids())
		}
	}
	s := small.Stats().Sum()
	if s.Preemptions == 0 {
		t.Error("no preemption; the batch was meant to outgrow the blocks")
	}
	if s.BlocksFree != s.BlocksTotal {
		t.Errorf("blocks are lost: %+v", s)
	}
}
