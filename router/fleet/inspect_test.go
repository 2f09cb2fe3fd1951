package fleet

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

func inspect(t *testing.T, e *testEngine) *EngineInfo {
	t.Helper()
	ep, err := upstream.NewEndpoint(e.url(), upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	return Inspect(context.Background(), ep, 10*time.Second)
}

func TestInspectSGLang(t *testing.T) {
	e := newEngine(t)
	e.sglang.Store(true)
	e.setModels(&e.models, `{"object":"list","data":[{"id":"q","owned_by":"sglang","root":"q","max_model_len":131072}]}`)
	e.setModels(&e.metrics, "sglang:num_running_reqs{model_name=\"q\",dp_rank=\"1\"} 2\nsglang:num_queue_reqs{dp_rank=\"1\"} 5\nsglang:token_usage{dp_rank=\"1\",tp_rank=\"0\"} 0.5\nsglang:token_usage{dp_rank=\"1\",tp_rank=\"1\"} 0.5\n")
	e.setModels(&e.info, `{"version":"0.5.23","disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,"dp_size":2,"page_size":64,"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":64,"dp_size":2,"replay_endpoint_port_base":5657,"load_endpoint_port_base":5757,"load_topic":"load"}}`)
	a := inspect(t, e)
	if a.Engine != SGLang || a.Version != "0.5.23" || !a.RoleKnown || a.Role != worker.Prefill || a.BootstrapPort != 8998 || a.BlockSize != 64 || a.Ranks != 2 || a.MaxModelLen != 131072 {
		t.Errorf("%+v", a)
	}
	if want := "[{0 tcp://127.0.0.1:5557 false tcp://127.0.0.1:5657 kv tcp://127.0.0.1:5757 load /server_info} {1 tcp://127.0.0.1:5558 false tcp://127.0.0.1:5658 kv tcp://127.0.0.1:5758 load /server_info}]"; fmt.Sprint(a.Events) != want {
		t.Errorf("events: %v", a.Events)
	}

	// Its /health takes a token through the scheduler, so the fleet asks others.
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "s", URL: e.url(), Ranks: []uint16{0, 1}})
	p := waitRanks(t, f, "q", 2)
	testwait.Until(t, "load", func() bool {
		r := p.Aggregated[1]
		return r.Running.Load() == 2 && r.Waiting.Load() == 5 && r.KVUsage() == 0.5
	})
	asked := e.count("/ping")
	testwait.Until(t, "probes by /ping", func() bool { return e.count("/ping") > asked+3 })
	if src, ok := f.EventSource(p.Aggregated[1]); !ok || src.Endpoint != "tcp://127.0.0.1:5558" {
		t.Errorf("events of rank 1: %v %v", src, ok)
	}
	if s, _ := stateOf(f, "s"); s != worker.Ready {
		t.Errorf("state %s", s)
	}
}

// TestAskPassesOverHiddenText: names and versions with control, direction or zero-width
// characters are passed over, and the answer says which.
func TestAskPassesOverHiddenText(t *testing.T) {
	e := newEngine(t)
	e.sglang.Store(true)
	e.setModels(&e.models, `{"object":"list","data":[{"id":"a\u202eb"},{"id":"good","owned_by":"sglang"},{"id":"x","parent":"good\u200b"},{"id":"c\u009bd"}]}`)
	e.setModels(&e.info, `{"version":"0.5\u001b[31m","page_size":64}`)
	a := inspect(t, e)
	if got := strings.Join(a.Names(), " "); got != "good" || a.Version != "" || a.Err != nil {
		t.Errorf("models %q, version %q, %v; want good alone", got, a.Version, a.Err)
	}
	refusedList := strings.Join(a.Refused, "\n")
	for _, want := range []string{`data[0].id: "a\u202eb"`, `data[2].parent: "good\u200b"`, `data[3].id: "c\u009bd"`, `GET /server_info: version: "0.5\x1b[31m"`} {
		if !strings.Contains(refusedList, want) {
			t.Errorf("refused are\n%s\nwant %s", refusedList, want)
		}
	}
	e.setModels(&e.models, `{"object":"list","data":[{"id":"a\u2066b"}]}`)
	if a := inspect(t, e); a.Err == nil || !strings.Contains(a.Err.Error(), `data[0].id: "a\u2066b"`) {
		t.Errorf("of one model that is not shown: %v", a.Err)
	}
}

func TestEventsOfRanks(t *testing.T) {
	e := newEngine(t)
	e.setModels(&e.events, `{"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:7001","replay_endpoint":"tcp://*:7101","topic":"t"},"0":{"publisher":"zmq","endpoint":"tcp://10.0.0.9:7000","replay_endpoint":null},"x":{"endpoint":"tcp://*:1"},"2":{"publisher":"null","endpoint":"tcp://*:2"}}`)
	f, l := newFleet(t, Options{})
	two := []uint16{0, 1}
	for _, s := range []worker.Spec{
		{ID: "auto", Ranks: two}, {ID: "off", Ranks: two, KVEvents: []string{"off"}},
		{ID: "base", Ranks: two, KVEvents: []string{"tcp://*:5557"}, KVReplay: []string{"tcp://h:5657"}},
		{ID: "each", Ranks: two, KVEvents: []string{"ipc:///tmp/a", "ipc:///tmp/b"}},
		{ID: "bind", Ranks: two, KVEvents: []string{"bind:tcp://127.0.0.1:9000"}},
		{ID: "over", Ranks: two, KVEvents: []string{"tcp://h:65535"}},
	} {
		s.URL = e.url()
		mustAdd(t, f, s)
	}
	waitRanks(t, f, "tiny", 12)
	var got []string
	for _, w := range f.View().Workers {
		for _, r := range w.Ranks {
			src, ok := f.EventSource(r)
			got = append(got, fmt.Sprint(r.ID, " ", ok, " ", src))
		}
	}
	want := `auto/0 true {0 tcp://10.0.0.9:7000 false     /kv_event_sources}
auto/1 true {1 tcp://127.0.0.1:7001 false tcp://127.0.0.1:7101 t   /kv_event_sources}
base/0 true {0 tcp://127.0.0.1:5557 false tcp://h:5657    config}
base/1 true {1 tcp://127.0.0.1:5558 false tcp://h:5658    config}
bind/0 true {0 tcp://127.0.0.1:9000 true     config}
bind/1 true {1 tcp://127.0.0.1:9001 true     config}
each/0 true {0 ipc:///tmp/a false     config}
each/1 true {1 ipc:///tmp/b false     config}
off/0 false {0  false     }
off/1 false {0  false     }
over/0 true {0 tcp://h:65535 false     config}
over/1 false {0  false     }`
	if strings.Join(got, "\n") != want {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
	// An engine that moved its events is a new process.
	e.setModels(&e.events, `{"0":{"publisher":"zmq","endpoint":"tcp://*:8000"},"1":{"publisher":"zmq","endpoint":"tcp://*:8001"}}`)
	e.unhealthy.Store(true)
	waitRanks(t, f, "tiny", 0)
	e.unhealthy.Store(false)
	waitRanks(t, f, "tiny", 12)
	if !strings.Contains(l.String(), "leave:auto") {
		t.Error("the move was not reported")
	}
}

func TestGarbageNeverAdmits(t *testing.T) {
	e := newEngine(t)
	e.setModels(&e.info, "")
	f, _ := newFleet(t, Options{})
	for i, g := range []string{
		"", "null", "[]", "{}", "\x00\xff", `{"data":null}`, `{"data":[{}]}`, `{"data":[{"id":7}]}`, `{"data":[null]}`, `{"data":[{"id":"x","max_model_len":"many"}]}`,
		strings.Repeat("[", 100_000), "<html>502</html>", strings.Repeat("vllm:num_requests_running{", 1000), `vllm:x{engine="`, "vllm:x{engine=\"0\\", "a{} ", "{}", "a{b=\"c\"}1", "\n\n \n",
	} {
		e.setModels(&e.garbage, g)
		a := inspect(t, e)
		if a.Err == nil || len(a.Models) != 0 {
			t.Errorf("%d: a model was found in garbage: %+v", i, a)
		}
		if i == 0 {
			mustAdd(t, f, worker.Spec{ID: "g", URL: e.url()})
		}
		readPage([]byte(g))
		_ = a.readEventSources([]byte(g))
		_ = a.readServerInfo([]byte(g))
	}
	huge := strings.Repeat("x", maxInspectBody+1)
	e.setModels(&e.garbage, huge)
	if a := inspect(t, e); a.Err == nil {
		t.Error("an endless answer was read")
	}
	if s, _ := stateOf(f, "g"); s == worker.Ready {
		t.Error("garbage made a worker ready")
	}
	e.garbage.Store(nil)
	waitRanks(t, f, "tiny", 1)
	e.setModels(&e.garbage, "garbage")
	asked := e.count("/metrics")
	testwait.Until(t, "scrapes of garbage", func() bool { return e.count("/metrics") > asked+3 })
}

func TestIncarnationEnded(t *testing.T) {
	for _, c := range []struct {
		name     string
		old, now incarnation
		refused  bool
		ended    bool
	}{
		{"same start", incarnation{started: 5, tokens: -1}, incarnation{started: 5, tokens: -1}, true, false},
		{"newer start", incarnation{started: 5}, incarnation{started: 6}, false, true},
		{"older start", incarnation{started: 5}, incarnation{started: 4}, true, false},
		{"newer metrics", incarnation{created: 5}, incarnation{created: 6}, false, true},
		{"counter fell", incarnation{tokens: 5}, incarnation{tokens: 4}, false, true},
		{"counter rose", incarnation{tokens: 5}, incarnation{tokens: 9}, false, false},
		{"refused, nothing known", incarnation{tokens: -1}, incarnation{tokens: -1}, true, true},
		{"nothing known", incarnation{tokens: -1}, incarnation{tokens: -1}, false, false},
		{"metrics gone", incarnation{started: 5, tokens: 5}, incarnation{tokens: -1}, false, false},
		{"sources moved", incarnation{started: 5, sources: "a"}, incarnation{started: 5, sources: "b"}, false, true},
		{"sources not reported now", incarnation{started: 5, sources: "a"}, incarnation{started: 5}, false, false},
	} {
		if sign, got := c.old.restartSign(&c.now, c.refused); (got != "") != c.ended || (sign != "") != c.ended {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

func FuzzPage(f *testing.F) {
	f.Add([]byte("vllm:num_requests_running{engine=\"0\",model_name=\"a}\\\"b\"} 3 170\nprocess_start_time_seconds 1e9\n"))
	f.Add([]byte("sglang:token_usage{dp_rank=\"1\"} NaN\nvllm:cache_config_info{block_size=\"16\"} 1"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p := readPage(text)
		for rank, l := range p.loads {
			if rank < -1 || rank > 65535 || l.usage > 1 {
				t.Fatalf("rank %d: %+v", rank, l)
			}
		}
		if p.blockSize < 0 || p.totalBlocks < 0 {
			t.Fatal("negative size")
		}
	})
}
