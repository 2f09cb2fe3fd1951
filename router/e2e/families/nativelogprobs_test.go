package families

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestNativeLogprobs: SGLang's decode server returns no log-probabilities of the prompt. The router
// adds those of prefill, so that the response equals that of one engine.
func TestNativeLogprobs(t *testing.T) {
	t.Parallel()
	const ids = `"input_ids":[1001,1002,1003,1004,1005,1006,1007,1008,1009],`
	requests := map[string]string{
		"all of the prompt":      `{` + ids + `"return_logprob":true,"logprob_start_len":0`,
		"its end":                `{` + ids + `"return_logprob":true,"logprob_start_len":5,"return_text_in_logprobs":true`,
		"no more than it makes":  `{` + ids + `"return_logprob":true`,
		"the likeliest":          `{` + ids + `"logprob_start_len":2,"top_logprobs_num":3,"return_logprob":true`,
		"a batch":                `{"input_ids":[[1001,1002,1003],[1011,1012,1013,1014,1015]],"return_logprob":true,"logprob_start_len":[1,2]`,
		"a batch, one of it":     `{"input_ids":[[1001,1002,1003],[1011,1012,1013,1014,1015]],"return_logprob":[false,true],"logprob_start_len":0`,
		"choices":                `{"input_ids":[1001,1002,1003],"return_logprob":true,"logprob_start_len":0,"sampling_params":{"n":2,"max_new_tokens":5,"ignore_eos":true}`,
		"events of over 64 KiB":  `{` + ids + `"top_logprobs_num":300,"return_logprob":true,"sampling_params":{"max_new_tokens":30,"ignore_eos":true}`,
		"none":                   `{` + ids + `"return_logprob":false`,
		"a text that names them": `{"text":"\"return_logprob\":true"`,
	}
	for _, c := range []struct {
		name   string
		engine func(*sim.Options)
		worker func(*config.Worker, *sim.Engine)
	}{
		{"both at once", func(*sim.Options) {}, harness.WithBootstrap},
		{"deltas", func(o *sim.Options) { o.Incremental = true }, harness.WithBootstrap},
		{"prefill first", func(*sim.Options) {}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			engine := func(role string) *sim.Engine {
				return harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role = "sglang", role; c.engine(o) })
			}
			p, d, whole := engine("prefill"), engine("decode"), engine("aggregated")
			var pw config.Worker
			if pw = harness.SimWorker(p, worker.Prefill, "p0"); c.worker != nil {
				c.worker(&pw, p)
			}
			r := harness.StartRouter(t, harness.UsingFamily("sglang"), pw, harness.SimWorker(d, worker.Decode, "d0"))
			for name, body := range requests {
				if !strings.Contains(body, "sampling_params") {
					body += `,"sampling_params":{"max_new_tokens":5,"ignore_eos":true}`
				}
				for _, s := range harness.Shapes {
					got, want := harness.Post(t, r.URL+"/generate", body+s.Extra+"}"), harness.Post(t, whole.URL()+"/generate", body+s.Extra+"}")
					if g, w := logprobsOf(t, got), logprobsOf(t, want); got.Status != 200 || !reflect.DeepEqual(g, w) {
						t.Errorf("%s, %s: %d\ngot  %v\nwant %v", name, s.Name, got.Status, g, w)
					}
					if a := got.Header.Get("X-Sluice-Prefill-Worker"); a != "p0" {
						t.Errorf("%s, %s: prefill by %q", name, s.Name, a)
					}
				}
			}
			harness.WantIdle(t, r, 20*time.Second, p, d)
		})
	}
}

// logprobsOf returns the texts and the lists of a response by sequence, event by event, because the
// sequences of a batch may arrive in any order.
func logprobsOf(t *testing.T, a *harness.Answer) map[string][]string {
	t.Helper()
	found := make(map[string][]string)
	add := func(place string, v map[string]any) {
		meta, _ := v["meta_info"].(map[string]any)
		of := map[string]any{"text": v["text"]}
		for name, list := range meta {
			if strings.HasSuffix(name, "_logprobs") {
				of[name] = list
			}
		}
		text, err := json.Marshal(of)
		if err != nil || meta == nil {
			t.Errorf("%v: %v", err, v)
		}
		found[place] = append(found[place], string(text))
	}
	if strings.HasPrefix(string(a.Body), "data:") {
		var h harness.StreamRecord
		harness.EachEvent(a, &h, func(name string, v map[string]any) {
			if v != nil {
				add(fmt.Sprint(v["index"]), v)
			}
		})
		if h.Broken != nil {
			t.Errorf("%v", h.Broken)
		}
		return found
	}
	var list []map[string]any
	if a.Body[0] != '[' {
		list = make([]map[string]any, 1)
		if err := json.Unmarshal(a.Body, &list[0]); err != nil {
			t.Fatal(err)
		}
	} else if err := json.Unmarshal(a.Body, &list); err != nil {
		t.Fatal(err)
	}
	for i, v := range list {
		add(fmt.Sprint(i), v)
	}
	return found
}

// TestNativeLogprobsAreLost: the response needs a part of prefill's response, but prefill fails after
// decode is complete. The router runs both legs again, before it has sent anything to the client.
func TestNativeLogprobsAreLost(t *testing.T) {
	for _, s := range harness.Shapes {
		t.Run(s.Name, func(t *testing.T) {
			engine := func(role string) *sim.Engine {
				return harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role = "sglang", role })
			}
			p0, p1, d, whole := engine("prefill"), engine("prefill"), engine("decode"), engine("aggregated")
			w0, w1 := harness.SimWorker(p0, worker.Prefill, "p0"), harness.SimWorker(p1, worker.Prefill, "p1")
			harness.WithBootstrap(&w0, p0)
			harness.WithBootstrap(&w1, p1)
			r := harness.StartRouter(t, harness.AllOf(harness.UsingFamily("sglang"), harness.ShortPrefillTimeout), w0, w1, harness.SimWorker(d, worker.Decode, "d0"))
			body := `{"text":"score me","return_logprob":true,"logprob_start_len":0,"sampling_params":{"max_new_tokens":5,"ignore_eos":true}` + s.Extra + `}`
			want := logprobsOf(t, harness.Post(t, whole.URL()+"/generate", body))
			p0.Fault(sim.Fault{Kind: sim.Truncate, Phase: "body", N: 1})
			for range 2 {
				if a := harness.Post(t, r.URL+"/generate", body); a.Status != 200 || !reflect.DeepEqual(logprobsOf(t, a), want) {
					t.Errorf("%d %s", a.Status, a.Body)
				}
			}
			if n := p0.Stats().Faults; n != 1 {
				t.Errorf("%d faults struck, want 1", n)
			}
			harness.WantIdle(t, r, 20*time.Second, p0, p1, d)
		})
	}
}

// TestNativeLogprobsAreCounted: the router keeps the part of prefill's response that every event of a
// stream repeats until the stream ends, and counts it against limits.memory_budget. Requests beyond
// the budget are refused.
func TestNativeLogprobsAreCounted(t *testing.T) {
	list := strings.Repeat(`[-1.5,1001,null],`, 5000)
	scored := `{"text":"a","meta_info":{"id":"x","finish_reason":{"type":"length","length":1},"prompt_tokens":9,"completion_tokens":1,"cached_tokens":0,"input_token_logprobs":[` + strings.TrimSuffix(list, ",") + `]},"disaggregated_params":{"bootstrap_host":"127.0.0.1","bootstrap_port":8998,"bootstrap_room":7}}`
	const event = `data: {"text":"a","meta_info":{"id":"x","finish_reason":%s,"prompt_tokens":9,"completion_tokens":1,"cached_tokens":0,"input_token_logprobs":[]}}` + "\n\n"
	for _, c := range []struct {
		name       string
		concurrent bool
		budget     int64
	}{{"beside", true, 1 << 20}, {"first", false, 1 << 20}, {"beside, no room", true, 64 << 10}, {"first, no room", false, 64 << 10}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			end, cut := make(chan struct{}), make(chan struct{})
			p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) { harness.ReplyJSON(w, 200, scored) })
			d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				fmt.Fprintf(w, event, "null")
				w.(http.Flusher).Flush()
				select {
				case <-end:
					fmt.Fprintf(w, event+"data: [DONE]\n\n", `{"type":"length","length":1}`)
				case <-r.Context().Done():
					close(cut)
				}
			})
			pw := p.Worker(worker.Prefill, "p0")
			if c.concurrent {
				pw = p.WithBootstrap("p0")
			}
			r := harness.StartRouter(t, harness.AllOf(harness.SGLangPD, func(cfg *config.Config) { cfg.Limits.MaxBody, cfg.Limits.MemoryBudget = 16<<10, c.budget }), pw, d.Worker(worker.Decode, "d0"))
			used := func() float64 { return r.Metric("sluice_memory_budget_used_bytes") }
			var a *harness.Answer
			var wg sync.WaitGroup
			wg.Go(func() {
				a = harness.Post(t, r.URL+"/generate", `{"input_ids":[1001,1002],"return_logprob":true,"logprob_start_len":0,"stream":true}`)
			})
			if c.budget < int64(len(scored)) {
				wg.Wait()
				harness.WantReason(t, a, 503, "memory_budget")
				if !c.concurrent { // decode is sent only after prefill's response was read
					return
				}
				harness.WantNoLoad(t, r)
				if d.Requests() == 0 { // prefill's response was refused before decode was sent
					return
				}
				select {
				case <-cut:
				case <-time.After(30 * time.Second):
					t.Error("decode was not cut")
				}
			} else {
				testwait.UntilWithin(t, 30*time.Second, "the scores are counted", func() bool { return used() >= float64(len(scored)) })
				close(end)
				wg.Wait()
				if n := strings.Count(string(a.Body), list[:len(list)-1]); a.Status != 200 || n != 2 {
					t.Errorf("%d, the scores %d times", a.Status, n)
				}
			}
			harness.WantNoLoad(t, r)
			testwait.UntilWithin(t, 30*time.Second, "the budget is whole again", func() bool { return used() == 0 })
		})
	}
}
