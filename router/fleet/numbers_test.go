package fleet

import (
	"fmt"
	"strings"
	"testing"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

// Output of vLLM 0.32 on the second of two nodes with eight ranks each
// (--data-parallel-hybrid-lb --data-parallel-start-rank 8): its own ranks by their numbers
// over both nodes, in the metrics and as the sources of events.
func secondNode(t *testing.T) *testEngine {
	e := newEngine(t)
	var metrics, sources strings.Builder
	metrics.WriteString("process_start_time_seconds 1000\n")
	sources.WriteString("{")
	for r := 8; r < 16; r++ {
		fmt.Fprintf(&metrics, "vllm:num_requests_running{engine=\"%d\",model_name=\"tiny\"} %d.0\n", r, 100+r)
		fmt.Fprintf(&sources, `"%d":{"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"},`, r, 5557+r, 5657+r)
	}
	e.setModels(&e.metrics, metrics.String())
	e.setModels(&e.events, strings.TrimSuffix(sources.String(), ",")+"}")
	return e
}

func TestRanksOfASecondNode(t *testing.T) {
	local, global := []uint16{0, 1, 2, 3, 4, 5, 6, 7}, []uint16{8, 9, 10, 11, 12, 13, 14, 15}
	base, replay := []string{"tcp://*:5557"}, []string{"tcp://*:5657"}
	for name, c := range map[string]struct {
		spec   worker.Spec
		silent bool // of its sources
	}{
		"counted from 0":                       {worker.Spec{Ranks: local}, false},
		"counted from 0, sources not reported": {worker.Spec{Ranks: local, KVEvents: base, KVReplay: replay}, true},
		"counted from 0, start rank named":     {worker.Spec{Ranks: local, StartRank: 8, KVEvents: base, KVReplay: replay}, true},
		"the engine's numbers":                 {worker.Spec{Ranks: global}, false},
		"the engine's numbers, and the start":  {worker.Spec{Ranks: global, StartRank: 8}, false},
	} {
		t.Run(name, func(t *testing.T) {
			e := secondNode(t)
			if c.silent {
				e.events.Store(nil)
			}
			f, _ := newFleet(t, Options{})
			c.spec.ID, c.spec.URL = "w", e.url()
			mustAdd(t, f, c.spec)
			waitRanks(t, f, "tiny", 8)
			for i, r := range f.View().Workers[0].Ranks {
				src, ok := f.EventSource(r)
				if want := fmt.Sprintf("tcp://127.0.0.1:%d tcp://127.0.0.1:%d", 5557+8+i, 5657+8+i); !ok || src.Endpoint+" "+src.Replay != want {
					t.Errorf("events of rank %d at %s %s, want %s", r.ID.Rank, src.Endpoint, src.Replay, want)
				}
				if r.HeaderRank() != i || !r.SendRank {
					t.Errorf("rank %d is %d in the header, want %d", r.ID.Rank, r.HeaderRank(), i)
				}
				testwait.Until(t, fmt.Sprintf("load of rank %d", r.ID.Rank), func() bool { return r.Running.Load() == int64(100+8+i) })
			}
		})
	}
}

// Ranks that the engine does not have keep a worker out, whichever way they are counted.
func TestRanksThatASecondNodeLacks(t *testing.T) {
	a := &EngineInfo{Ranks: 16, StartRank: 8}
	for _, c := range []struct {
		ranks []uint16
		start int
		ok    bool
	}{
		{[]uint16{0, 7}, 0, true}, {[]uint16{0, 8}, 0, false}, {[]uint16{8, 15}, 0, true}, {[]uint16{8, 16}, 0, false},
		{[]uint16{0, 7}, 8, true}, {[]uint16{0, 7}, 4, false}, {[]uint16{0, 7}, 9, false}, {nil, 0, true},
	} {
		if why := a.MissingRanks(&worker.Spec{Ranks: c.ranks, StartRank: c.start}); (why == "") != c.ok {
			t.Errorf("ranks %v from %d: %q", c.ranks, c.start, why)
		}
	}
}
