package kvevents

import (
	"encoding/binary"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// TestLLMDSimEvents: the events of llm-d-inference-sim are placed, whichever format it
// writes: its arrays name 0 as the parent of a prompt's first block.
func TestLLMDSimEvents(t *testing.T) {
	for _, format := range []string{"array", "map"} {
		payload, err := os.ReadFile("testdata/llmd/" + format + ".bin")
		if err != nil {
			t.Fatal(err)
		}
		for _, engine := range []string{"vllm", ""} {
			index := kvindex.New(kvindex.Options{})
			rank := worker.New(worker.Spec{ID: "w"}).Ranks[0]
			a := NewApplier(index, rank, "test", engine)
			if err := a.Apply(payload); err != nil {
				t.Fatal(err)
			}
			if a.counts["stored"] != 5 || a.counts["orphans"] != 0 {
				t.Errorf("%s as %q: %v; want 5 blocks stored", format, engine, a.counts)
			}
			_, events := decodeAll(t, NewDecoder(engine), payload)
			tokens := append(events[0].Tokens, events[1].Tokens...)
			var found kvindex.Overlap
			index.Find(blockhash.Seqs(nil, blockhash.NewSalt("test", "", ""), tokens, 16), &found)
			if n := found.Depth(rank.Slot); n != 5 {
				t.Errorf("%s as %q: %d blocks of the second prompt are found on the rank, want 5", format, engine, n)
			}
		}
	}
}

// lockedText is a log for several goroutines.
type lockedText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestOrphansAreWarnedOnce: a feed whose every block hangs on one that is not known is
// live and useless, and says so, once.
func TestOrphansAreWarnedOnce(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	endpoint := "tcp://" + l.Addr().String()
	l.Close()
	var lines lockedText
	logs, log := lines.String, slog.New(slog.NewTextHandler(&lines, nil))
	index := kvindex.New(kvindex.Options{})
	feeds := NewFeeds(Options{Index: index, Log: log})
	defer feeds.Close()
	rank := worker.New(worker.Spec{ID: "w"}).Ranks[0]
	if err := feeds.Start(Source{Rank: rank, Model: "m", Engine: "vllm", Endpoint: endpoint, Bind: true}); err != nil {
		t.Fatal(err)
	}
	pub, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	pub.SetLinger(0)
	if err := pub.Connect(endpoint); err != nil {
		t.Fatal(err)
	}
	const line = "cannot index any block"
	seq := uint64(0)
	send := func(parent byte) {
		// [time, [["BlockStored", [hash], parent, [1, 2], 2, nil]]]
		m := append([]byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x96, 0xab}, "BlockStored"...)
		m = append(m, 0x91, 0xce, 0, 1, byte(seq>>8), byte(seq), parent, 0x92, 1, 2, 2, 0xc0)
		pub.SendMessage("", binary.BigEndian.AppendUint64(nil, seq), m)
		seq++
	}
	until := func(what string, parent byte, ok func() bool) {
		t.Helper()
		if !testwait.Poll(20*time.Second, func() bool { send(parent); return ok() }) {
			t.Fatalf("not within 20 s: %s\n%s", what, logs())
		}
	}
	until("the feed yields nothing but orphans", 77, rank.Orphans.Load)
	until("it warns", 77, func() bool { return strings.Contains(logs(), line) })
	for range 3 * orphanThreshold {
		send(77)
	}
	until("a block is placed", 0, func() bool { return !rank.Orphans.Load() })
	if n := strings.Count(logs(), line); n != 1 {
		t.Errorf("it warns %d times\n%s", n, logs())
	}
	until("it logs that blocks are indexed again", 0, func() bool { return strings.Contains(logs(), "blocks are indexed again") })
	if index.Len() == 0 {
		t.Error("nothing was stored")
	}
}
