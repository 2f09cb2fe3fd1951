package kvevents

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

// packed writes v as msgpack in its longest forms, or the shortest of maps, as the
// engines' encoders do.
func packed(t testing.TB, v any) []byte {
	t.Helper()
	switch v := v.(type) {
	case nil:
		return []byte{0xc0}
	case int:
		return binary.BigEndian.AppendUint64([]byte{0xd3}, uint64(v))
	case float64:
		return binary.BigEndian.AppendUint64([]byte{0xcb}, math.Float64bits(v))
	case string:
		return append([]byte{0xd9, byte(len(v))}, v...)
	case []any:
		b := []byte{0xdc, 0, byte(len(v))}
		for _, x := range v {
			b = append(b, packed(t, x)...)
		}
		return b
	case m:
		b := []byte{0x80 | byte(len(v))}
		for k, x := range v {
			b = append(append(b, packed(t, k)...), packed(t, x)...)
		}
		return b
	}
	t.Fatalf("cannot pack %T", v)
	return nil
}

type m = map[string]any

func TestDecodeLoads(t *testing.T) {
	busy := packed(t, m{"version": 1, "worker_id": "w0", "dp_rank": 3, "wall_time": 0.5,
		"scheduled_requests": m{"num_prefill_requests": 2, "sum_prefill_tokens": 900, "num_decode_requests": 11, "var_decode_kv_tokens": 0.25},
		"queued_requests":    m{"num_prefill_requests": 4, "sum_prefill_tokens": 5000, "num_decode_requests": 1}})
	stat := func(more ...any) []byte { return packed(t, append([]any{"LoadStat"}, more...)) }
	preempted := packed(t, m{"version": 1, "dp_rank": 0, "queued_requests": m{"num_decode_requests": 2, "sum_decode_kv_tokens": 800, "sum_prefill_tokens": 100}})
	sglang := packed(t, m{"timestamp": 1.5, "dp_rank": 1, "num_running_reqs": 7, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 300, "token_usage": 0.75, "speculative": nil})
	for _, c := range []struct {
		name string
		msg  []byte
		want string
	}{
		{"dynamo, requests put back", preempted, "[{0 0 2 900 -1}]"},
		{"sglang's stat", stat(7, 2, 4096, 16384, 3, 300, 5000, 256, 1, 1), "[{3 7 2 300 0.25}]"},
		{"sglang's stat, the least", stat(7, 2, 4096, 0, nil), "[{-1 7 2 -1 -1}]"},
		{"sglang's stat, of a newer release", stat(0, 0, 0, 16384, 0, 0, 0, 256, 1, 1, m{"a": []any{1}}), "[{0 0 0 0 0}]"},
		{"stats of several ranks", packed(t, []any{[]any{"LoadStat", 1, 0, 1, 2, 5}, nil, []any{"LoadStat", 2, 0, 1, 2, 0}}), "[{5 1 0 -1 0.5} {0 2 0 -1 0.5}]"},
		{"dynamo busy", busy, "[{3 13 5 5000 -1}]"},
		{"sglang", sglang, "[{1 7 2 300 0.75}]"},
		{"sglang, tokens of the queue not reported", packed(t, m{"timestamp": 1.5, "num_waiting_reqs": 2}), "[{0 0 2 -1 0}]"},
		{"sglang, all zero", packed(t, m{"timestamp": 1.5}), "[{0 0 0 0 0}]"},
		{"a vector", packed(t, []any{m{"timestamp": 1, "dp_rank": 1, "num_running_reqs": 4}, nil, m{"timestamp": 1, "num_running_reqs": 9}}), "[{1 4 0 0 0} {0 9 0 0 0}]"},
		{"an empty vector", packed(t, []any{}), "[]"},
	} {
		got, err := DecodeLoads(nil, c.msg)
		if err != nil || fmt.Sprint(got) != c.want {
			t.Errorf("%s: %v, %v; want %s", c.name, got, err, c.want)
		}
		for n := range c.msg { // cut anywhere: an error, never a panic
			if _, err := DecodeLoads(nil, c.msg[:n]); err == nil {
				t.Errorf("%s: cut at %d of %d: no error", c.name, n, len(c.msg))
			}
		}
	}
	for _, bad := range [][]byte{packed(t, m{"a": 1}), packed(t, "x"), packed(t, m{"num_running_reqs": -1}), packed(t, m{"num_running_reqs": "x"}),
		append(packed(t, m{"timestamp": 1}), 0), stat(1, 2, 3, 4), packed(t, []any{"Other", 1, 2, 3, 4, 5}), stat(1, -2, 3, 4, 5), packed(t, m{"version": 2, "dp_rank": 0}), {0xdd, 0xff, 0xff, 0xff, 0xff}} {
		if got, err := DecodeLoads(nil, bad); err == nil {
			t.Errorf("%x: %v", bad, got)
		}
	}
}

// Every fixture is read as its maker says.
func TestLoadFixtures(t *testing.T) {
	names, err := filepath.Glob("testdata/load/*.bin")
	if err != nil || len(names) < 6 {
		t.Fatalf("%d fixtures, %v", len(names), err)
	}
	for _, name := range names {
		msg, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		recorded, err := os.ReadFile(strings.TrimSuffix(name, ".bin") + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var want []struct {
			Rank, Running, Waiting int
			QueuedTokens           int `json:"queued_tokens"`
			Usage                  float64
		}
		if err := json.Unmarshal(recorded, &want); err != nil {
			t.Fatal(err)
		}
		got, err := DecodeLoads(nil, msg)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, %v; want %v", name, got, err, want)
		}
		for n := range msg {
			if _, err := DecodeLoads(nil, msg[:n]); err == nil {
				t.Errorf("%s: cut at %d of %d: no error", name, n, len(msg))
			}
		}
	}
}

func FuzzDecodeLoads(f *testing.F) {
	f.Add(packed(f, m{"timestamp": 1, "dp_rank": 1, "num_running_reqs": 4}))
	f.Add(packed(f, []any{}))
	f.Add(packed(f, []any{"LoadStat", 1, 2, 3, 4, nil, 6}))
	f.Add(packed(f, m{"queued_requests": m{"sum_prefill_tokens": 1}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		loads, _ := DecodeLoads(nil, b)
		for _, l := range loads {
			if l.Running < 0 || l.Waiting < 0 || l.QueuedTokens < -1 || l.Usage > 1 || l.Usage != l.Usage {
				t.Errorf("%+v", l)
			}
		}
	})
}

// Each rank's messages are applied to that rank, from a real socket.
func TestLoadsGoToTheirRanks(t *testing.T) {
	pub, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	pub.SetLinger(0)
	if err := pub.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	ep, _ := pub.GetLastEndpoint()
	w := worker.New(worker.Spec{ID: "w", Ranks: []uint16{0, 1, 2}})
	l := NewLoads(nil)
	defer l.Close()
	if err := l.Start(LoadSource{Rank: w.Ranks[1], Endpoint: ep, Topic: "load"}); err != nil {
		t.Fatal(err)
	}
	if err := l.Start(LoadSource{Rank: w.Ranks[0], Endpoint: "nonsense"}); err == nil {
		t.Error("nonsense is an endpoint")
	}
	seq := uint64(0)
	send := func(v any) {
		seq++
		pub.SendMessage("load", binary.BigEndian.AppendUint64(nil, seq), packed(t, v))
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		testwait.Until(t, what, ok)
	}
	until("the subscription stands", func() bool {
		send(m{"timestamp": 1, "dp_rank": 1, "num_running_reqs": 5, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 700, "token_usage": 0.5})
		return w.Ranks[1].Running.Load() == 5
	})
	if w.Ranks[0].Running.Load() != -1 || w.Ranks[2].Waiting.Load() != -1 {
		t.Error("a rank got what another said")
	}
	if r := w.Ranks[1]; r.Waiting.Load() != 2 || r.QueuedTokens.Load() != 700 || r.KVUsage() != 0.5 {
		t.Errorf("rank 1: %d waiting, %d tokens, %v", r.Waiting.Load(), r.QueuedTokens.Load(), r.KVUsage())
	}
	send([]any{})
	send("garbage")
	send(m{"timestamp": 1, "dp_rank": 9})
	send([]any{m{"timestamp": 1, "dp_rank": 2, "num_running_reqs": 8}, m{"timestamp": 1, "num_running_reqs": 3}})
	until("both of the vector arrived", func() bool { return w.Ranks[2].Running.Load() == 8 && w.Ranks[0].Running.Load() == 3 })
	if _, malformed, wrongRank := l.Counts(); malformed != 1 || wrongRank != 1 {
		t.Errorf("%d malformed, %d of other ranks; want 1 and 1", malformed, wrongRank)
	}
	// Silence of one rank is not made good by another that speaks, nor by garbage.
	until("what was said of a silent rank is forgotten", func() bool {
		send("garbage")
		send(m{"timestamp": 1, "dp_rank": 2, "num_running_reqs": 6})
		return w.Ranks[1].QueuedTokens.Load() == -1 && w.Ranks[1].Waiting.Load() == -1
	})
	until("its share of blocks in use too", func() bool { return w.Ranks[1].KVUsage() == -1 })
	if w.Ranks[2].Running.Load() != 6 {
		t.Error("what a rank says is forgotten because another is silent")
	}
	l.Stop(w)
	until("all is forgotten", func() bool { return w.Ranks[2].Running.Load() == -1 })
}

// A message that names no rank is of the rank whose socket it came from; where one
// socket is several ranks', it is nobody's: never the first one's.
func TestLoadsWithoutARank(t *testing.T) {
	pub, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	pub.SetLinger(0)
	if err := pub.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	ep, _ := pub.GetLastEndpoint()
	for _, sharing := range []bool{false, true} {
		w := worker.New(worker.Spec{ID: "w", Ranks: []uint16{0, 1}})
		l := NewLoads(nil)
		defer l.Close()
		if err := l.Start(LoadSource{Rank: w.Ranks[1], Endpoint: ep}); err != nil {
			t.Fatal(err)
		}
		if sharing {
			if err := l.Start(LoadSource{Rank: w.Ranks[0], Endpoint: ep}); err != nil {
				t.Fatal(err)
			}
		}
		testwait.Until(t, "a message is heard", func() bool {
			pub.SendMessage("load", "12345678", packed(t, []any{"LoadStat", 3, 1, 0, 0, nil}))
			applied, _, wrongRank := l.Counts()
			return applied+wrongRank > 0
		})
		want := int64(3)
		if sharing {
			want = -1
		}
		if a, b := w.Ranks[0].Running.Load(), w.Ranks[1].Running.Load(); a != -1 || b != want {
			t.Errorf("sharing %v: ranks have %d and %d running, want -1 and %d", sharing, a, b, want)
		}
	}
}
