package sim

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"sluice/bench/sim/faults"
	"sluice/bench/testwait"
)

// sglangVolatile is what differs between an engine of a pair and a whole one.
var sglangVolatile = regexp.MustCompile(`"(cached_tokens|e2e_latency)":[0-9.]+`)

var indexOf = regexp.MustCompile(`"index":\d+|\[DONE\]`)

// sglangPair is a prefill and a decode engine of SGLang.
func sglangPair(t testing.TB, o Options) (p, d *Engine) {
	o.Engine = "sglang"
	return startPair(t, o)
}

// bothLegs sends one request to both legs at once, as a router does, with the
// bootstrap members put in front; the first answer is prefill's.
func bothLegs(t testing.TB, p, d *Engine, path, members, body string) (pa, da answer) {
	t.Helper()
	host, port := p.Bootstrap()
	body = fmt.Sprintf(`{"bootstrap_host":%q,"bootstrap_port":%d,%s,%s`, host, port, members, body[1:])
	var wg sync.WaitGroup
	wg.Go(func() { pa = post(t, p, path, body) })
	wg.Go(func() { da = post(t, d, path, body) })
	wg.Wait()
	return pa, da
}

func wantIdle(t testing.TB, engines ...*Engine) {
	t.Helper()
	testwait.Until(t, "all blocks free, nothing waits", func() bool {
		for _, e := range engines {
			if s := e.Stats().Sum(); s.BlocksFree != s.BlocksTotal || s.Running+s.Waiting+s.Rooms != 0 {
				return false
			}
		}
		return true
	})
}

func TestSGLangHandOver(t *testing.T) {
	p, d := sglangPair(t, Options{})
	plain := fastOptions(t, Options{Engine: "sglang"})
	cases := []struct{ name, path, members, body string }{
		{"generate", "/generate", `"bootstrap_room":11`, `{"input_ids":` + idPrompt(100, 1) + `,"rid":"r1","sampling_params":{"max_new_tokens":6,"ignore_eos":true}}`},
		{"generate_stream", "/generate", `"bootstrap_room":12`, `{"text":"Once upon a time","sampling_params":{"max_new_tokens":3,"ignore_eos":true},"stream":true,"rid":"abc"}`},
		{"generate_batch", "/generate", `"bootstrap_room":[21,22]`, `{"input_ids":[[300,301],[302]],"rid":["a","b"],"sampling_params":[{"max_new_tokens":2,"ignore_eos":true},{"max_new_tokens":3,"ignore_eos":true}]}`},
		{"generate_batch_scalar", "/generate", `"bootstrap_room":31`, `{"text":["one","two"],"rid":["a","b"],"sampling_params":{"max_new_tokens":2,"ignore_eos":true},"stream":true}`},
		{"generate_n", "/generate", `"bootstrap_room":41`, `{"input_ids":[[300,301],[302]],"rid":["a","b"],"sampling_params":{"max_new_tokens":2,"ignore_eos":true,"n":2}}`},
		{"chat", "/v1/chat/completions", `"bootstrap_room":51`, `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":3,"ignore_eos":true,"rid":"r1"}`},
		{"chat_stream", "/v1/chat/completions", `"bootstrap_room":52`, `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":3,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"rid":"r1"}`},
		{"chat_n", "/v1/chat/completions", `"bootstrap_room":53`, `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2,"n":2,"stream":true,"ignore_eos":true,"rid":"r1"}`},
		{"completion", "/v1/completions", `"bootstrap_room":[61,62]`, `{"prompt":["a b","c d"],"max_tokens":2,"ignore_eos":true,"rid":"r1"}`},
		{"completion_stream", "/v1/completions", `"bootstrap_room":63`, `{"prompt":[300,301],"max_tokens":2,"ignore_eos":true,"stream":true,"rid":"r1"}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			pa, da := bothLegs(t, p, d, c.path, c.members, c.body)
			whole := post(t, plain, c.path, c.body)
			if pa.status != 200 || da.status != 200 {
				t.Fatalf("prefill %d %s\ndecode %d %s", pa.status, pa.body, da.status, da.body)
			}
			// Sequences of one answer are not in step, so their events are sorted.
			steadyTimes := func(b []byte) string {
				events := strings.SplitAfter(sglangVolatile.ReplaceAllString(normalized(string(b)), `"$1":0`), "\n\n")
				if !strings.Contains(c.body, "[\"") && !strings.Contains(c.body, `"n":2`) {
					return strings.Join(events, "")
				}
				slices.SortStableFunc(events, func(x, y string) int { return strings.Compare(indexOf.FindString(x), indexOf.FindString(y)) })
				return strings.Join(events, "")
			}
			if got, want := steadyTimes(da.body), steadyTimes(whole.body); got != want {
				t.Errorf("decode answered\n%s\nan aggregated engine\n%s", got, want)
			}
			golden(t, "sglang_"+c.name+".txt", fmt.Sprintf("POST %s\n%s\n\nprefill %d\n%s\n\ndecode %d\n%s\n", c.path, c.body, pa.status, steadyTimes(pa.body), da.status, steadyTimes(da.body)))
		})
	}
	wantIdle(t, p, d)
	ps, ds := p.Stats().Sum(), d.Stats().Sum()
	if ps.RoomsFailed+ps.RoomsReused+ps.RoomsTimedOut != 0 || ds.LocalCompute != 0 || ds.External == 0 {
		t.Errorf("prefill %+v\ndecode %+v", ps, ds)
	}
}

func TestSGLangNativeStreams(t *testing.T) {
	body := `{"text":"Once upon a time","sampling_params":{"max_new_tokens":4,"ignore_eos":true},"stream":true}`
	texts := func(o Options) (list []string) {
		o.Engine = "sglang"
		for ev := range strings.SplitSeq(string(post(t, fastOptions(t, o), "/generate", body).body), "\n\n") {
			var v struct{ Text string }
			if json.Unmarshal([]byte(strings.TrimPrefix(ev, "data: ")), &v) == nil {
				list = append(list, v.Text)
			}
		}
		return list
	}
	whole, deltas := texts(Options{}), texts(Options{Incremental: true})
	if len(whole) != 4 || len(deltas) != 4 {
		t.Fatalf("%d and %d events, want 4", len(whole), len(deltas))
	}
	for i := range whole {
		if want := strings.Join(deltas[:i+1], ""); whole[i] != want {
			t.Errorf("event %d holds %q, deltas so far %q", i, whole[i], want)
		}
	}
	if a := post(t, fastOptions(t, Options{Engine: "sglang", SkipTokenizer: true}), "/generate", `{"input_ids":[300],"sampling_params":{"max_new_tokens":1}}`); strings.Contains(string(a.body), `"text"`) {
		t.Errorf("text without a tokenizer: %s", a.body)
	}
}

func TestSGLangRefuses(t *testing.T) {
	p, d := sglangPair(t, Options{Ranks: 2})
	for name, c := range map[string]struct {
		e         *Engine
		body      string
		headers   []string
		want      int
		inMessage string
	}{
		"no room on prefill": {p, `{"text":"a"}`, nil, 400, "Disaggregated request received without bootstrap room id"},
		"no room on decode":  {d, `{"text":"a","bootstrap_host":"127.0.0.1"}`, nil, 400, "Disaggregated request received without bootstrap room id"},
		"no host":            {d, `{"text":"a","bootstrap_room":1}`, nil, 400, "bootstrap_host"},
		"room not a number":  {p, `{"text":"a","bootstrap_room":"1"}`, nil, 400, "bootstrap_room"},
		"room too large":     {p, `{"text":"a","bootstrap_room":9223372036854775808}`, nil, 400, "bootstrap_room"},
		"negative room":      {p, `{"text":"a","bootstrap_room":-1}`, nil, 400, "out of range"},
		"batch of rooms":     {p, `{"text":["a","b"],"bootstrap_room":[1]}`, nil, 400, "for a batch of 2"},
		"same room twice":    {p, `{"text":["a","b"],"bootstrap_room":[1,1]}`, nil, 400, "used twice"},
		"rank too large":     {p, `{"text":"a","bootstrap_room":1,"routed_dp_rank":2}`, nil, 400, "out of range [0, 2)"},
		"rank header":        {p, `{"text":"a","bootstrap_room":1}`, []string{"X-Data-Parallel-Rank", "x"}, 400, "not an integer"},
		"text and ids":       {p, `{"text":"a","input_ids":[1],"bootstrap_room":1}`, nil, 400, "text, input_ids"},
	} {
		if a := post(t, c.e, "/generate", c.body, c.headers...); a.status != c.want || !strings.Contains(string(a.body), c.inMessage) {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	if a := post(t, p, "/v1/completions", `{"prompt":"a"}`); a.status != 400 || !strings.HasPrefix(string(a.body), `{"object":"error","message":"Disaggregated`) {
		t.Errorf("OpenAI error is not flat: %d %s", a.status, a.body)
	}
	if code, body := get(t, p.URL()+"/version"); code != 404 {
		t.Errorf("SGLang has no /version: %d %s", code, body)
	}
	wantIdle(t, p, d)
}

// TestSGLangRanks: prefill's rank follows the room, or is said on both sides;
// named on one side only, the legs wait for each other until they time out.
func TestSGLangRanks(t *testing.T) {
	const short = 300 * time.Millisecond
	body := `{"input_ids":` + idPrompt(64, 1) + `,"sampling_params":{"max_new_tokens":2}}`
	for _, c := range []struct {
		name, balance, members string
		rank                   int // of prefill, -1 it fails
	}{
		{"room", "", `"bootstrap_room":103`, 3},
		{"both", "", `"bootstrap_room":104,"routed_dp_rank":2,"disagg_prefill_dp_rank":2`, 2},
		{"prefill only", "", `"bootstrap_room":108,"routed_dp_rank":1`, -1},
		{"asked", "round_robin", `"bootstrap_room":109,"routed_dp_rank":3`, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := sglangPair(t, Options{Ranks: 4, Balance: c.balance, BootstrapTimeout: short, WaitingTimeout: short})
			_, a := bothLegs(t, p, d, "/generate", c.members, body)
			if ok := a.status == 200; ok != (c.rank >= 0) {
				t.Errorf("decode: %d %s", a.status, a.body)
			}
			if c.rank >= 0 && p.Stats().Ranks[c.rank].GeneratedTokens != 1 {
				t.Errorf("rank %d of prefill did not run: %+v", c.rank, p.Stats().Ranks)
			}
			if c.rank < 0 && p.Stats().Sum().RoomsTimedOut != 2 { // the decode's handshake on one rank, the prefill's request on the other
				t.Errorf("rooms timed out: %+v", p.Stats().Sum())
			}
			wantIdle(t, p, d)
		})
	}
}

func TestSGLangRoomReuse(t *testing.T) {
	p, d := sglangPair(t, Options{BootstrapTimeout: 200 * time.Millisecond, WaitingTimeout: 200 * time.Millisecond})
	body := `{"text":"a b c","sampling_params":{"max_new_tokens":2}}`
	if pa, da := bothLegs(t, p, d, "/generate", `"bootstrap_room":7`, body); pa.status != 200 || da.status != 200 {
		t.Fatalf("%s\n%s", pa.body, da.body)
	}
	pa, da := bothLegs(t, p, d, "/generate", `"bootstrap_room":7`, body)
	if pa.status != 500 || da.status != 500 || !strings.Contains(string(pa.body), "KVTransferError(bootstrap_room=7)") || !strings.Contains(string(da.body), "KVTransferError(bootstrap_room=7)") {
		t.Errorf("second use: %d %s\n%d %s", pa.status, pa.body, da.status, da.body)
	}
	if p.Stats().Sum().RoomsReused == 0 {
		t.Error("reuse was not counted")
	}
	wantIdle(t, p, d)
}

// TestSGLangSingleLegs: one leg alone holds its place until its own timeout; the
// shapes of its failure are those of the endpoint.
func TestSGLangSingleLegs(t *testing.T) {
	p, d := sglangPair(t, Options{BootstrapTimeout: 100 * time.Millisecond, WaitingTimeout: 100 * time.Millisecond})
	host, port := p.Bootstrap()
	room := 1000
	for _, e := range []*Engine{p, d} {
		for _, c := range []struct {
			path, body string
			status     int
			want       string
		}{
			{"/generate", `"text":"a"`, 500, `{"error":{"message":"`},
			{"/generate", `"text":"a","stream":true`, 200, `"finish_reason":{"type":"abort","message":"`},
			{"/v1/completions", `"prompt":"a"`, 500, `{"object":"error","message":"`},
			{"/v1/completions", `"prompt":"a","stream":true`, 200, `data: {"error":{"object":"error","message":"`},
			{"/v1/chat/completions", `"messages":[{"role":"user","content":"a"}],"stream":true`, 200, `data: {"error":{"object":"error","message":"`},
		} {
			room++
			a := post(t, e, c.path, fmt.Sprintf(`{"bootstrap_host":%q,"bootstrap_port":%d,"bootstrap_room":%d,%s}`, host, port, room, c.body))
			if a.status != c.status || !strings.Contains(string(a.body), c.want) || !strings.Contains(string(a.body), fmt.Sprintf("KVTransferError(bootstrap_room=%d)", room)) {
				t.Errorf("%s %s: %d %s", c.path, c.body, a.status, a.body)
			}
			if a.status == 200 && !strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
				t.Errorf("%s: no [DONE] after the error: %s", c.path, a.body)
			}
		}
	}
	wantIdle(t, p, d)
}

// TestSGLangClientAborts frees a leg's own place at once; the other is not notified.
func TestSGLangClientAborts(t *testing.T) {
	p, d := sglangPair(t, Options{})
	host, port := p.Bootstrap()
	for i, e := range []*Engine{d, p} {
		body := fmt.Sprintf(`{"bootstrap_host":%q,"bootstrap_port":%d,"bootstrap_room":%d,"text":"a b c d","stream":true}`, host, port, i)
		c := dial(t, e.Addr())
		io.WriteString(c, request("/generate", body))
		testwait.Until(t, "it waits for the other", func() bool { return e.Stats().Sum().Waiting == 1 })
		time.Sleep(20 * time.Millisecond) // until decode's handshake is there
		c.Close()
		testwait.Until(t, "its place is free", func() bool {
			s := e.Stats().Sum()
			return s.Waiting == 0 && s.BlocksFree == s.BlocksTotal && s.Aborted == 1
		})
	}
}

func TestSGLangAbortRequest(t *testing.T) {
	e := fastOptions(t, Options{Engine: "sglang", Speed: 1})
	done := make(chan answer)
	go func() {
		a, _ := tryPost(e.URL()+"/generate", `{"text":"a","rid":"job-17","sampling_params":{"max_new_tokens":5000,"ignore_eos":true}}`)
		done <- a
	}()
	testwait.Until(t, "it runs", func() bool { return e.Stats().Sum().Running == 1 })
	for _, rid := range []string{"", "other"} {
		post(t, e, "/abort_request", fmt.Sprintf(`{"rid":%q}`, rid))
	}
	if e.Stats().Sum().Aborted != 0 {
		t.Error("an empty or unknown rid aborted something")
	}
	if a := post(t, e, "/abort_request", `{"rid":"job-"}`); a.status != 200 {
		t.Errorf("abort: %d %s", a.status, a.body)
	}
	if a := <-done; a.status != 200 || !strings.Contains(string(a.body), `"type":"abort"`) {
		t.Errorf("aborted: %d %s", a.status, a.body)
	}
}

func TestSGLangPromptMismatch(t *testing.T) {
	p, d := sglangPair(t, Options{})
	host, port := p.Bootstrap()
	members := fmt.Sprintf(`{"bootstrap_host":%q,"bootstrap_port":%d,"bootstrap_room":5,`, host, port)
	var pa, da answer
	var wg sync.WaitGroup
	wg.Go(func() { pa = post(t, p, "/generate", members+`"text":"a b"}`) })
	wg.Go(func() { da = post(t, d, "/generate", members+`"text":"a c"}`) })
	wg.Wait()
	if pa.status != 500 || da.status != 500 || p.Stats().Sum().RoomsMismatched != 1 {
		t.Errorf("%d %s\n%d %s", pa.status, pa.body, da.status, da.body)
	}
}

func TestBootstrapServer(t *testing.T) {
	p := fastOptions(t, Options{Engine: "sglang", Role: "prefill", Ranks: 2, RegisterDelay: 150 * time.Millisecond})
	host, port := p.Bootstrap()
	base := fmt.Sprintf("http://%s:%d", host, port)
	all := base + "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	if code, _ := get(t, base+"/health"); code != 200 {
		t.Errorf("health: %d", code)
	}
	if code, _ := get(t, all); code != 503 {
		t.Errorf("before the ranks are registered: %d, want 503", code)
	}
	if code, _ := get(t, p.URL()+"/ready"); code != 503 {
		t.Errorf("/ready: %d, want 503", code)
	}
	testwait.Until(t, "ranks are registered", func() bool { code, _ := get(t, all); return code == 200 })
	if _, body := get(t, all); !strings.HasPrefix(body, `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":2,"pp_size":1,"page_size":16,"kv_cache_dtype":"auto","follow_bootstrap_room":true,"prefill_http_port":`) {
		t.Errorf("server info: %s", body)
	}
	for q, want := range map[string]int{
		"prefill_dp_rank=1&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0": 200,
		"prefill_dp_rank=2&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0": 404,
		"prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0":                  400,
		"": 400,
	} {
		if code, body := get(t, base+"/route?"+q); code != want || code == 200 && !strings.HasPrefix(body, `{"rank_ip":"127.0.0.1","rank_port":`) {
			t.Errorf("/route?%s: %d %s, want %d", q, code, body, want)
		}
	}
	do := func(method, path, body string) (int, string) {
		req, _ := http.NewRequest(method, base+path, strings.NewReader(body))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	do("POST", "/register_dp_rank", `{"bootstrap_room":9,"dp_rank":1}`)
	if _, body := do("POST", "/query_dp_ranks", `{"bootstrap_rooms":[9,10]}`); body != `{"9":1}` {
		t.Errorf("query_dp_ranks: %s", body)
	}
	// A server of four ranks is not complete with two.
	do("PUT", "/route", `{"attn_tp_size":2,"attn_tp_rank":1,"attn_cp_size":1,"attn_cp_rank":0,"system_dp_size":2,"system_dp_rank":0,"pp_size":1,"pp_rank":0,"rank_ip":"127.0.0.1","rank_port":1}`)
	if code, _ := get(t, all); code != 503 {
		t.Errorf("with three of four ranks: %d, want 503", code)
	}
	p.Fault(faults.Fault{Kind: faults.Status, Status: 500, Leg: "bootstrap", N: 1})
	if code, _ := get(t, base+"/health"); code != 500 {
		t.Errorf("fault on bootstrap: %d", code)
	}
	fastOptions(t, Options{Engine: "sglang", Role: "decode"}) // has none
}

func TestSGLangHandOverFaults(t *testing.T) {
	body := `{"text":"a b c","sampling_params":{"max_new_tokens":2}}`
	for name, c := range map[string]struct {
		onPrefill bool
		f         faults.Fault
		pa, da    int
	}{
		"send fails":    {true, faults.Fault{Kind: faults.Status, Leg: "handover"}, 500, 500},
		"receive fails": {false, faults.Fault{Kind: faults.Reset, Leg: "handover"}, 500, 500}, // prefill by its timeout
		"send is late":  {true, faults.Fault{Kind: faults.Slow, Leg: "handover", Delay: 50 * time.Millisecond}, 200, 200},
		"not this one":  {true, faults.Fault{Kind: faults.Status, Leg: "handover", ID: "zzz"}, 200, 200},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := sglangPair(t, Options{BootstrapTimeout: 200 * time.Millisecond})
			if c.onPrefill {
				p.Fault(c.f)
			} else {
				d.Fault(c.f)
			}
			pa, da := bothLegs(t, p, d, "/generate", `"bootstrap_room":1`, body)
			if pa.status != c.pa || da.status != c.da {
				t.Errorf("prefill %d %s\ndecode %d %s", pa.status, pa.body, da.status, da.body)
			}
			wantIdle(t, p, d)
		})
	}
	t.Run("prefill dies", func(t *testing.T) {
		p, d := sglangPair(t, Options{HeartbeatInterval: 50 * time.Millisecond})
		p.Fault(faults.Fault{Kind: faults.Stall, Leg: "handover"})
		time.AfterFunc(100*time.Millisecond, p.Crash)
		host, port := p.Bootstrap()
		go tryPost(p.URL()+"/generate", fmt.Sprintf(`{"bootstrap_room":1,%s`, body[1:]))
		a := post(t, d, "/generate", fmt.Sprintf(`{"bootstrap_host":%q,"bootstrap_port":%d,"bootstrap_room":1,%s`, host, port, body[1:]))
		if a.status != 500 || !strings.Contains(string(a.body), "Lost connection with prefill instance") {
			t.Errorf("decode: %d %s", a.status, a.body)
		}
		wantIdle(t, d)
	})
	t.Run("no bootstrap server", func(t *testing.T) {
		_, d := sglangPair(t, Options{})
		a := post(t, d, "/generate", `{"bootstrap_host":"127.0.0.1","bootstrap_port":1,"bootstrap_room":1,"text":"a"}`)
		if a.status != 500 || !strings.Contains(string(a.body), "Could not fetch prefill parallel info") {
			t.Errorf("decode: %d %s", a.status, a.body)
		}
	})
}

func TestSGLangOverrideHeaders(t *testing.T) {
	body := `{"text":"a b","sampling_params":{"max_new_tokens":1}}`
	p, d := sglangPair(t, Options{HeaderOverrides: true})
	host, port := p.Bootstrap()
	h := []string{"x-override-rid", "h1", "x-override-bootstrap-host", host, "x-override-bootstrap-port", fmt.Sprint(port), "x-override-bootstrap-room", "77"}
	go tryPost(p.URL()+"/generate", body, h...)
	if a := post(t, d, "/generate", body, h...); a.status != 200 || !strings.Contains(string(a.body), `"id":"h1"`) {
		t.Errorf("%d %s", a.status, a.body)
	}
	off := fastOptions(t, Options{Engine: "sglang", Role: "prefill"})
	if a := post(t, off, "/generate", body, h...); a.status != 400 {
		t.Errorf("headers were obeyed without being switched on: %d %s", a.status, a.body)
	}
}

func TestSGLangAux(t *testing.T) {
	p := fastOptions(t, Options{Engine: "sglang", Role: "prefill", Ranks: 2})
	_, port := p.Bootstrap()
	for path, want := range map[string]string{
		"/server_info":                     fmt.Sprintf(`"disaggregation_bootstrap_port":%d`, port),
		"/get_server_info":                 `"disaggregation_mode":"prefill"`,
		"/get_model_info":                  `"is_generation":true`,
		"/v1/models":                       `"owned_by":"sglang"`,
		"/v1/loads":                        `"loads":[{"timestamp":`,
		"/v1/loads?dp_rank=1":              `"dp_rank":1,`,
		"/v1/loads?format=prometheus":      `sglang:num_running_reqs{dp_rank="1"} 0`,
		"/metrics":                         `sglang:num_queue_reqs{dp_rank="1",`,
		"/health_generate":                 "",
		"/flush_cache?timeout=1":           "Cache flushed",
		"/ready":                           "",
		"/v1/loads?include=core&dp_rank=0": `"dp_rank":0,`,
	} {
		if code, body := get(t, p.URL()+path); code != 200 || !strings.Contains(body, want) {
			t.Errorf("GET %s: %d %s, want %q", path, code, body, want)
		}
	}
	if code, _ := get(t, p.URL()+"/v1/loads?dp_rank=2"); code != 400 {
		t.Errorf("rank 2 of 2: %d", code)
	}
}

// TestSGLangLoads: the load socket is announced, and tells what runs.
func TestSGLangLoads(t *testing.T) {
	e := fastOptions(t, Options{Engine: "sglang", Loads: "auto", Speed: 1, Ranks: 2})
	var info struct {
		Events struct {
			Port  int    `json:"load_endpoint_port_base"`
			Topic string `json:"load_topic"`
		} `json:"kv_events"`
	}
	_, body := get(t, e.URL()+"/server_info")
	if err := json.Unmarshal([]byte(body), &info); err != nil || info.Events.Port == 0 || info.Events.Topic != "load" {
		t.Fatalf("server_info: %v %s", err, body)
	}
	sub, err := zmq.NewSocket(zmq.SUB)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	sub.SetSubscribe("load")
	sub.SetRcvtimeo(10 * time.Second)
	if err := sub.Connect(fmt.Sprintf("tcp://127.0.0.1:%d", info.Events.Port+1)); err != nil {
		t.Fatal(err)
	}
	go tryPost(e.URL()+"/generate", `{"text":"a","routed_dp_rank":1,"sampling_params":{"max_new_tokens":400,"ignore_eos":true}}`)
	for end := time.Now().Add(20 * time.Second); ; {
		frames, err := sub.RecvMessageBytes(0)
		if err != nil || len(frames) != 3 || len(frames[1]) != 8 {
			t.Fatalf("%d frames, %v", len(frames), err)
		}
		v, _, err := msgp.ReadIntfBytes(frames[2])
		m, _ := v.([]any) // name, running, waiting, tokens, room, rank, …
		if err != nil || len(m) != 11 || m[0] != "LoadStat" || fmt.Sprint(m[5]) != "1" {
			t.Fatalf("%v %v", m, err)
		}
		if fmt.Sprint(m[1]) == "1" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the running request got no error event: %v", m)
		}
	}
}
