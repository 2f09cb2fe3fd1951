package migration

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

var migratableRequests = []struct{ name, path, body string }{
	{"chat", "/v1/chat/completions", `"messages":[{"role":"user","content":"go on and on"}],"max_completion_tokens":40,"ignore_eos":true`},
	{"chat to the end", "/v1/chat/completions", `"messages":[{"role":"user","content":"say it"}],"stream_options":{"include_usage":true},"max_tokens":60,"min_tokens":20`},
	{"chat with usage all along", "/v1/chat/completions", `"messages":[{"role":"user","content":"go on"}],"ignore_eos":true,"max_tokens":30,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`},
	{"chat with ids", "/v1/chat/completions", `"messages":[{"role":"user","content":"go on"}],"ignore_eos":true,"max_tokens":30,"return_token_ids":true,"stream_options":{"include_usage":true}`},
	{"completion", "/v1/completions", `"prompt":"go on and on","max_tokens":40,"min_tokens":30,"stream_options":{"include_usage":true}`},
	{"completion of ids", "/v1/completions", `"prompt":[900,901,902,903],"max_tokens":40,"ignore_eos":true,"temperature":0,"seed":7,"stream_options":{"include_usage":true}`},
	{"completion of one more", "/v1/completions", `"prompt":"short","ignore_eos":true`},
}

// TestStreamMigrates: the client does not notice that an engine fails, at any point of a stream.
func TestStreamMigrates(t *testing.T) {
	t.Parallel()
	kinds := []sim.FaultKind{sim.Reset, sim.Truncate, sim.StreamFail, sim.Stall}
	for _, pd := range []bool{false, true} {
		t.Run(fmt.Sprint("pd=", pd), func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, pd, 2, func(c *config.Config) { c.Timeouts.StreamIdle = 700 * time.Millisecond })
			for _, k := range migratableRequests {
				for _, kind := range kinds {
					after := 1 + rand.IntN(12)
					body := fmt.Sprintf(`{"model":"sim","stream":true,%s}`, k.body)
					want := harness.Post(t, m.Reference.URL()+k.path, body)
					m.Fail("breaks", sim.Fault{Kind: kind, After: after})
					was := m.Migrated("done")
					a := harness.Post(t, m.URL+k.path, body, "X-Request-Id", "breaks")
					t.Log(k.name, kind, "after", after)
					harness.WantSameContent(t, a, want)
					testwait.UntilWithin(t, 5*time.Second, fmt.Sprintf("%s, %s after %d: it is counted", k.name, kind, after), func() bool { return m.Migrated("done") > was })
					if h := a.Header.Get("X-Sluice-Migration"); h != "ready" {
						t.Errorf("header %q", h)
					}
					m.Clear()
				}
			}
			harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
		})
	}
}

// TestMigratedStreamKeepsHops: the leg that continues a stream names the same routers as the first
// one, so that a loop of routers is found on it too.
func TestMigratedStreamKeepsHops(t *testing.T) {
	for _, pd := range []bool{false, true} {
		m := harness.StartMigrationFleet(t, pd, 2, nil)
		for _, passed := range []string{"", "first, second"} {
			m.Fail("breaks", sim.Fault{Kind: sim.Reset, After: 5})
			was := m.Migrated("done")
			headers := []string{"X-Request-Id", "breaks"}
			if passed != "" {
				headers = append(headers, "X-Sluice-Via", passed)
			}
			harness.Post(t, m.URL+"/v1/completions", `{"model":"sim","stream":true,"prompt":"go on","max_tokens":40,"ignore_eos":true}`, headers...)
			testwait.UntilWithin(t, 5*time.Second, "the migration is counted", func() bool { return m.Migrated("done") > was })
			seen := map[string]bool{}
			for _, e := range m.Engines {
				for _, rec := range harness.GenerateRequests(e) {
					seen[rec.Header("X-Sluice-Via")] = true
				}
				e.ForgetRequests()
			}
			if len(seen) != 1 {
				t.Errorf("pd %v: the legs passed %v; want one list", pd, seen)
			}
			for via := range seen {
				own, ok := strings.CutPrefix(via, passed)
				if own = strings.TrimPrefix(own, ","); !ok || own == "" || strings.Contains(own, ",") {
					t.Errorf("pd %v: passed %q, the engine got %q", pd, passed, via)
				}
			}
			m.Clear()
		}
	}
}

// TestMigratedStreamCompletes: a stream migrates just before the model ends it with a stop token
// that is not part of the text. The resumed stream ends at the same place.
func TestMigratedStreamCompletes(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 2, nil)
	moved := 0
	for n := 0; moved < 12; n++ {
		if n == 100 {
			t.Fatalf("%d streams of %d ended by themselves: the test shows nothing", moved, n)
		}
		body := fmt.Sprintf(`{"model":"sim","stream":true,"prompt":"say it %d","max_tokens":400}`, n)
		want := harness.Post(t, m.Reference.URL()+"/v1/completions", body)
		if ends := harness.ReadStreamContent(want).Finish; !slices.Equal(ends, []string{"stop"}) {
			continue
		}
		moved++
		events := bytes.Count(want.Body, []byte("data: {"))
		for after := max(1, events-3); after < events; after++ {
			m.Fail("ends", sim.Fault{Kind: sim.Reset, After: after})
			harness.WantSameContent(t, harness.Post(t, m.URL+"/v1/completions", body, "X-Request-Id", "ends"), want)
			m.Clear()
		}
	}
}

// TestStreamMigratesTwice: a stream migrates twice if the configuration allows it, and not a
// third time.
func TestStreamMigratesTwice(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 3, func(c *config.Config) { c.Migration.MaxAttempts = 2 })
	body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on and on"}],"ignore_eos":true,"max_tokens":60,"min_tokens":50,"stream_options":{"include_usage":true}}`
	want := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body)
	for _, e := range m.Engines {
		e.Fault(sim.Fault{Kind: sim.Slow, ID: "twice-3"})
		e.Fault(sim.Fault{Kind: sim.Reset, After: 7, ID: "twice"})
	}
	a := harness.Post(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "twice")
	harness.WantSameContent(t, a, want)
	if n := m.Migrated("done"); n != 2 {
		t.Errorf("%v migrations, want 2", n)
	}
	var asked []string
	for _, e := range m.Engines {
		for _, r := range harness.GenerateRequests(e) {
			asked = append(asked, r.Header("X-Request-Id"))
			if r.Header("X-Request-Id") == "twice-3" && (!bytes.Contains(r.Body, []byte(`"max_tokens":47`)) || !bytes.Contains(r.Body, []byte(`"min_tokens":37`))) {
				t.Errorf("the third engine, behind 6 and 7 tokens, was asked %s", r.Body)
			}
		}
	}
	slices.Sort(asked)
	if fmt.Sprint(asked) != "[twice twice-2 twice-3]" {
		t.Errorf("engines were asked %q", asked)
	}
	rec := m.Outcome(t, "twice")
	if rec.Outcome.Reason != "" || rec.Outcome.OutputTokens != 60 || !strings.Contains(fmt.Sprint(rec.Notes), "continues the stream") {
		t.Errorf("outcome %+v, notes %+v", rec.Outcome, rec.Notes)
	}
	m.Clear()
	for _, e := range m.Engines {
		e.Fault(sim.Fault{Kind: sim.Reset, After: 7})
	}
	s := harness.ReadStreamContent(harness.Post(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "thrice"))
	if full := harness.ReadStreamContent(want).Text; s.Err == "" || s.Done != 1 || len(s.Broken) > 0 || !strings.HasPrefix(full, s.Text) || s.Text == "" {
		t.Errorf("%+v", s)
	}
	testwait.UntilWithin(t, 5*time.Second, "the limit is counted", func() bool { return m.Migrated("limit") == 1 })
	if m.Migrated("done") != 4 {
		t.Errorf("limit %v, done %v", m.Migrated("limit"), m.Migrated("done"))
	}
	harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
}

// TestUnmigratableStreams: streams that cannot migrate end with an error event, and the explain
// record gives the reason.
func TestUnmigratableStreams(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 2, nil)
	chat := `"messages":[{"role":"user","content":"go on"}],`
	for _, k := range []struct{ why, path, body string }{
		{"multiple_choices", "/v1/chat/completions", chat + `"n":2`},
		{"logprobs", "/v1/chat/completions", chat + `"logprobs":true`},
		{"logprobs", "/v1/completions", `"prompt":"a b c","logprobs":0`},
		{"structured", "/v1/chat/completions", chat + `"response_format":{"type":"json_object"}`},
		{"structured", "/v1/chat/completions", chat + `"guided_regex":"a*"`},
		{"tools", "/v1/chat/completions", chat + `"tools":[{"type":"function","function":{"name":"f"}}]`},
		{"media", "/v1/chat/completions", `"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]`},
		{"echo", "/v1/completions", `"prompt":"a b c","echo":true`},
		{"beam_search", "/v1/completions", `"prompt":"a b c","use_beam_search":true`},
		{"batch_prompt", "/v1/completions", `"prompt":["a b c","d"]`},
		{"stop", "/v1/completions", `"prompt":"a b c","stop":["zzz"]`},
		{"penalties", "/v1/completions", `"prompt":"a b c","presence_penalty":0.5`},
		{"seed", "/v1/completions", `"prompt":"a b c","seed":3`},
		{"reasoning", "/v1/chat/completions", chat + `"reasoning_effort":"high"`},
		{"tools", "/v1/messages", chat + `"tools":[{"name":"f","input_schema":{}}]`},
		{"stop", "/v1/messages", chat + `"stop_sequences":["zzz"]`},
		{"reasoning", "/v1/messages", chat + `"thinking":{"type":"enabled","budget_tokens":20}`},
		{"no_prompt_ids", "/v1/messages", `"messages":[{"role":"user","content":[{"type":"text","text":"a part"}]}]`},
		{"structured", "/v1/responses", `"input":"go on","text":{"format":{"type":"json_schema","schema":{}}}`},
		{"logprobs", "/v1/responses", `"input":"go on","include":["message.output_text.logprobs"]`},
		{"no_prompt_ids", "/v1/responses", `"input":[{"role":"user","content":"go on"}]`},
		{"prompt", "/v1/responses", `"input":"go on","previous_response_id":"resp_1"`},
		{"multiple_choices", "/inference/v1/generate", `"token_ids":[900,901],"sampling_params":{"ignore_eos":true,"max_tokens":20,"n":2}`},
		{"structured", "/inference/v1/generate", `"token_ids":[900,901],"sampling_params":{"ignore_eos":true,"max_tokens":20,"structured_outputs":{"regex":"a"}}`},
		{"logprobs", "/inference/v1/generate", `"token_ids":[900,901],"sampling_params":{"ignore_eos":true,"max_tokens":20,"logprobs":0}`},
		{"no_max_tokens", "/inference/v1/generate", `"token_ids":[900,901],"sampling_params":{"ignore_eos":true}`},
		{"media", "/inference/v1/generate", `"token_ids":[900,901],"features":{"mm_hashes":{}},"sampling_params":{"ignore_eos":true,"max_tokens":20}`},
	} {
		for _, e := range m.Engines {
			e.Fault(sim.Fault{Kind: sim.Reset, After: 4})
		}
		was := m.Migrated(k.why)
		a := harness.Post(t, m.URL+k.path, `{"model":"sim","stream":true,"max_tokens":30,"ignore_eos":true,`+k.body+`}`)
		s := harness.ReadStreamContent(a)
		if !strings.HasSuffix(k.path, "completions") && k.path != "/inference/v1/generate" { // API formats with named events and without [DONE]
			s.Done = 1
			if bytes.Contains(a.Body, []byte("event: error\n")) {
				s.Err = "an error event"
			}
		}
		if h := a.Header.Get("X-Sluice-Migration"); a.Status != 200 || s.Err == "" || s.Done != 1 || h != "no; "+k.why {
			t.Errorf("%s: status %d, header %q, %+v", k.why, a.Status, h, s)
		}
		testwait.UntilWithin(t, 5*time.Second, k.why+" is counted", func() bool { return m.Migrated(k.why) == was+1 })
		for _, e := range m.Engines {
			for _, r := range harness.GenerateRequests(e) {
				if bytes.Contains(r.Body, []byte("return_token_ids")) {
					t.Errorf("%s: an engine was asked for ids that nobody needs", k.why)
				}
			}
		}
		m.Clear()
	}
	if m.Migrated("done") != 0 {
		t.Errorf("%v went on", m.Migrated("done"))
	}
}

// TestMigrationWithoutTarget: if there is no worker to resume on, the client receives the output so
// far and then the error.
func TestMigrationWithoutTarget(t *testing.T) {
	for name, other := range map[string]sim.Fault{
		"busy":   {Kind: sim.Status, Body: `"prompt":[`},
		"gone":   {Kind: sim.Reset, Body: `"prompt":[`},
		"refuse": {Kind: sim.Status, Status: 400, Body: `"prompt":[`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, true, 3, nil)
			for _, e := range m.Engines {
				e.Fault(other)
				e.Fault(sim.Fault{Kind: sim.Truncate, After: 5})
			}
			body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on"}],"ignore_eos":true,"max_tokens":30}`
			want := harness.ReadStreamContent(harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body))
			a := harness.Post(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "nobody")
			if s := harness.ReadStreamContent(a); s.Err == "" || s.Done != 1 || s.Text == "" || !strings.HasPrefix(want.Text, s.Text) {
				t.Errorf("%+v", s)
			}
			testwait.UntilWithin(t, 5*time.Second, "it is counted", func() bool { return m.Migrated("failed") == 1 })
			n := 0
			for _, e := range m.Engines {
				n += len(harness.GenerateRequests(e))
			}
			// Two broken connections end a request; so does a refusal that others would repeat.
			if most := map[string]int{"busy": 3, "gone": 2, "refuse": 2}[name]; n != most {
				t.Errorf("%d engines were asked, want %d", n, most)
			}
			harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
		})
	}
}

// TestClientAbortsDuringMigration: the client leaves during a migration. The router cancels the
// resumed request at once, and no load or blocks remain.
func TestClientAbortsDuringMigration(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 2, nil)
	for _, phase := range []string{"", "body"} {
		for _, e := range m.Engines {
			e.Fault(sim.Fault{Kind: sim.Stall, Phase: phase, Body: `"prompt":[`})
			e.Fault(sim.Fault{Kind: sim.Reset, After: 5})
		}
		l := harness.StartRequest(t, m.Router, "leaves", `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on"}],"ignore_eos":true,"max_tokens":300}`)
		l.Event(t)
		testwait.UntilWithin(t, 10*time.Second, "another engine is asked", func() bool {
			return slices.ContainsFunc(append(harness.GenerateRequests(m.Engines[0]), harness.GenerateRequests(m.Engines[1])...), func(r sim.Record) bool { return bytes.Contains(r.Body, []byte(`"prompt":[`)) })
		})
		l.Disconnect()
		harness.WantIdle(t, m.Router, 3*time.Second, m.Engines...)
		m.Clear()
	}
}

// TestMigrationsLeaveNoState: after many migrations no goroutines, memory or reservations remain.
func TestMigrationsLeaveNoState(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 2, nil)
	body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on"}],"ignore_eos":true,"max_tokens":20}`
	round := func(n int) {
		m.Fail("many", sim.Fault{Kind: sim.Reset, After: 5})
		for range n {
			if s := harness.ReadStreamContent(harness.Post(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "many")); s.Err != "" || s.Done != 1 {
				t.Fatalf("%+v", s)
			}
		}
		m.Clear()
	}
	round(20)
	was := runtime.NumGoroutine()
	round(150)
	harness.WantIdle(t, m.Router, 5*time.Second, m.Engines...)
	testwait.UntilWithin(t, 5*time.Second, fmt.Sprintf("no more than %d goroutines and some", was), func() bool { return runtime.NumGoroutine() <= was+10 })
	if n := m.Migrated("done"); n != 170 {
		t.Errorf("%v migrations", n)
	}
}

// TestFirstByteTimeOut: a stream without a response head after timeouts.first_byte is retried on
// another engine. A request that is not streamed has the whole of timeouts.decode.
func TestFirstByteTimeOut(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, true, 2, func(c *config.Config) { c.Timeouts.FirstByte = 150 * time.Millisecond })
	chat := `{"model":"sim","stream":%v,"messages":[{"role":"user","content":"go on"}],"max_tokens":8,"ignore_eos":true}`
	m.Fail("late", sim.Fault{Kind: sim.Stall})
	body := fmt.Sprintf(chat, true)
	harness.WantSameContent(t, harness.Post(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "late"), harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body))
	m.Clear()
	m.Fail("late", sim.Fault{Kind: sim.Stall, Delay: 400 * time.Millisecond})
	a := harness.Post(t, m.URL+"/v1/chat/completions", fmt.Sprintf(chat, false), "X-Request-Id", "late")
	if n := len(harness.GenerateRequests(m.Engines[0])) + len(harness.GenerateRequests(m.Engines[1])); a.Status != 200 || n != 1 {
		t.Errorf("status %d, %d decodes", a.Status, n)
	}
}

// TestBreakerCountsBrokenStreams: broken streams open an engine's breaker; clients that leave and
// 4xx responses do not.
func TestBreakerCountsBrokenStreams(t *testing.T) {
	for name, k := range map[string]struct {
		fault sim.Fault
		open  bool
	}{
		"reset":  {sim.Fault{Kind: sim.Reset, After: 4}, true},
		"failed": {sim.Fault{Kind: sim.StreamFail, After: 4}, true},
		"400":    {sim.Fault{Kind: sim.Status, Status: 400}, false},
		"429":    {sim.Fault{Kind: sim.Status, Status: 429}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, false, 1, func(c *config.Config) { c.Health.BreakerFailures, c.Health.BreakerOpenTime = 3, 20*time.Second })
			m.Engines[0].Fault(k.fault)
			for range 3 {
				a := harness.Post(t, m.URL+"/v1/chat/completions", `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on"}],"max_tokens":20,"ignore_eos":true}`)
				if a.Status == 429 && a.Header.Get("Retry-After") == "" {
					t.Error("429 without Retry-After")
				}
			}
			rank := m.Fleet.View().Workers[0].Ranks[0]
			open := func() bool { return worker.BreakerState(rank.Breaker.Load()) == worker.BreakerOpen }
			if k.open {
				testwait.UntilWithin(t, 5*time.Second, "the breaker is open", open)
			} else if open() {
				t.Error("the breaker is open")
			}
		})
	}
}

// TestKilledEngineInProcesses runs a router and two engines as processes, and kills the engine of
// a stream in the middle of it.
func TestKilledEngineInProcesses(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	plain := harness.StartSim(t, nil)
	env, _ := harness.ServeEnv(t)
	args := []string{"serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}
	engines := map[string]*harness.Process{}
	for _, id := range []string{"a", "b"} {
		p := harness.Launch(t, nil, "sim", "--fault", "kind=slow,delay=10ms")
		engines[id] = p
		args = append(args, "--engine", "http://"+p.Addr+",id="+id)
	}
	r := harness.Launch(t, env, args...)
	r.Ready(t)
	testwait.UntilWithin(t, 10*time.Second, "both engines are there", func() bool {
		return bytes.Count(harness.Get(t, "http://"+r.Addr+"/metrics").Body, []byte(`state="ready"} 1`)) == 2
	})
	body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on and on"}],"ignore_eos":true,"max_tokens":60,"stream_options":{"include_usage":true}}`
	want := harness.Post(t, plain.URL()+"/v1/chat/completions", body)
	resp, err := http.Post("http://"+r.Addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	var read bytes.Buffer
	for range 2 * (3 + rand.IntN(20)) { // an event is a line and an empty line
		line, err := br.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		read.Write(line)
	}
	if err := engines[resp.Header.Get("X-Sluice-Worker")].Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(&read, br); err != nil {
		t.Fatal(err)
	}
	harness.WantSameContent(t, &harness.Answer{Status: resp.StatusCode, Header: resp.Header, Body: read.Bytes()}, want)
	if m := harness.Get(t, "http://"+r.Addr+"/metrics"); !bytes.Contains(m.Body, []byte(`sluice_migrations_total{outcome="done"} 1`)) {
		t.Error("no migration was counted")
	}
}
