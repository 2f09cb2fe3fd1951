package kvevents

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestResolve(t *testing.T) {
	for _, c := range []struct {
		endpoints string // separated by spaces
		ranks     []uint16
		want      string // the same, or "!" and a part of the error
	}{
		{"", []uint16{0}, ""},
		{"tcp://*:5557", []uint16{0}, "tcp://w1:5557"},
		{"tcp://*:5557", []uint16{0, 1, 7}, "tcp://w1:5557 tcp://w1:5558 tcp://w1:5564"},
		{"tcp://*:5557", []uint16{3}, "tcp://w1:5560"},
		{"tcp://0.0.0.0:5557", []uint16{1}, "tcp://w1:5558"},
		{"tcp://[::]:5557", []uint16{1}, "tcp://w1:5558"},
		{"tcp://10.0.0.9:5557", []uint16{1}, "tcp://10.0.0.9:5558"},
		{"tcp://[fe80::1]:5557", []uint16{1}, "tcp://[fe80::1]:5558"},
		{"tcp://a:1 tcp://*:2", []uint16{4, 9}, "tcp://a:1 tcp://w1:2"},
		{"ipc:///tmp/kv", []uint16{0}, "ipc:///tmp/kv"},
		{"ipc:///tmp/kv", []uint16{0, 1}, "!rank 0 alone"},
		{"tcp://a:1 tcp://a:2", []uint16{0, 1, 2}, "!2 endpoints among 3 ranks"},
		{"tcp://*:65535", []uint16{1}, "!above 65535"},
		{"tcp://*:0", []uint16{0}, "!not a number from 1 to 65535"},
		{"tcp://*:x", []uint16{0}, "!not a number"},
		{"tcp://*", []uint16{0}, "!names no port"},
		{"http://a:1", []uint16{0}, "!want tcp://HOST:PORT"},
		{"ipc://", []uint16{0}, "!want tcp://HOST:PORT"},
	} {
		got, err := Resolve("w1", strings.Fields(c.endpoints), c.ranks)
		if part, bad := strings.CutPrefix(c.want, "!"); bad {
			if err == nil || !strings.Contains(err.Error(), part) || !strings.HasPrefix(err.Error(), "kvevents: cannot ") {
				t.Errorf("%q for %v: error %v, want %q in it", c.endpoints, c.ranks, err, part)
			}
			continue
		}
		if err != nil || !slices.Equal(got, strings.Fields(c.want)) {
			t.Errorf("%q for %v: %q, %v; want %q", c.endpoints, c.ranks, got, err, c.want)
		}
	}
	if got, err := Resolve("[fe80::2]", []string{"tcp://*:5557"}, []uint16{0}); err != nil || got[0] != "tcp://[fe80::2]:5557" {
		t.Errorf("IPv6 worker: %q, %v", got, err)
	}
	if _, err := Resolve("", []string{"tcp://*:5557"}, []uint16{0}); err == nil {
		t.Error("a wildcard was resolved without a worker's host")
	}
}

func TestParseSources(t *testing.T) {
	const full = `{"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:5658",
		"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"},
		"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://10.1.1.1:5557","replay_endpoint":null,"topic":""},
		"2":{"enable_kv_cache_events":false,"publisher":"null","endpoint":"tcp://*:1"}, "3":{"publisher":"null"}}`
	got, err := ParseSources([]byte(full), "w1")
	want := []Endpoints{{Rank: 0, Pub: "tcp://10.1.1.1:5557"}, {Rank: 1, Pub: "tcp://w1:5558", Replay: "tcp://w1:5658", Topic: "kv"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if got, err := ParseSources([]byte(`{}`), "w1"); err != nil || len(got) != 0 {
		t.Errorf("none: %+v, %v", got, err)
	}
	for _, bad := range []string{``, `[]`, `{"x":{"endpoint":"tcp://*:1"}}`, `{"-1":{}}`, `{"0":{"endpoint":"tcp://*:0"}}`,
		`{"0":{"endpoint":"tcp://*:1","replay_endpoint":"nonsense"}}`, `{"0":3}`} {
		if got, err := ParseSources([]byte(bad), "w1"); err == nil {
			t.Errorf("%s: %+v, want an error", bad, got)
		}
	}
}

func TestParseServerInfo(t *testing.T) {
	const full = `{"model_path":"m","kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":64,
		"dp_size":2,"replay_endpoint_port_base":5600,"load_endpoint_port_base":5700,"load_topic":"load"}}`
	got, err := ParseServerInfo([]byte(full), "w1")
	want := ServerInfo{BlockSize: 64, Ranks: []Endpoints{
		{Rank: 0, Pub: "tcp://w1:5557", Replay: "tcp://w1:5600", Topic: "kv"},
		{Rank: 1, Pub: "tcp://w1:5558", Replay: "tcp://w1:5601", Topic: "kv"}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	for _, none := range []string{`{}`, `{"kv_events":null}`, `{"kv_events":{"publisher":"null"}}`} {
		if got, err := ParseServerInfo([]byte(none), "w1"); err != nil || len(got.Ranks) != 0 {
			t.Errorf("%s: %+v, %v", none, got, err)
		}
	}
	least, err := ParseServerInfo([]byte(`{"kv_events":{"publisher":"zmq","endpoint_host":"[::]","endpoint_port_base":5557}}`), "w1")
	if err != nil || len(least.Ranks) != 1 || least.Ranks[0] != (Endpoints{Pub: "tcp://w1:5557"}) {
		t.Errorf("least: %+v, %v", least, err)
	}
	for _, bad := range []string{``, `3`, `{"kv_events":3}`, `{"kv_events":{"endpoint_host":"*","endpoint_port_base":0}}`,
		`{"kv_events":{"endpoint_host":"*","endpoint_port_base":5557,"dp_size":1000000000}}`,
		`{"kv_events":{"endpoint_host":"*","endpoint_port_base":5557,"dp_size":0}}`,
		`{"kv_events":{"endpoint_host":"*","endpoint_port_base":70000}}`} {
		if got, err := ParseServerInfo([]byte(bad), "w1"); err == nil {
			t.Errorf("%s: %+v, want an error", bad, got)
		}
	}
}

func FuzzSources(f *testing.F) {
	f.Add([]byte(`{"0":{"publisher":"zmq","endpoint":"tcp://*:5557"},"kv_events":{"endpoint_host":"*","endpoint_port_base":5557}}`), "tcp://[::]:5557")
	f.Fuzz(func(t *testing.T, body []byte, endpoint string) {
		if list, err := ParseSources(body, "w1"); err == nil && slices.ContainsFunc(list, func(e Endpoints) bool { return e.Pub == "" }) {
			t.Fatalf("a rank without an endpoint: %+v", list)
		}
		if info, err := ParseServerInfo(body, "w1"); err == nil && len(info.Ranks) > maxRanks {
			t.Fatalf("%d ranks", len(info.Ranks))
		}
		if got, err := Resolve("w1", []string{endpoint}, []uint16{0, 9}); err == nil && len(got) != 2 {
			t.Fatalf("Resolve(%q) = %q", endpoint, got)
		}
	})
}
