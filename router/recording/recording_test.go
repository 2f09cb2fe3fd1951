package recording

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/worker"
)

func fleet(n int) (all []*worker.Rank) {
	for i := range n {
		w := worker.New(worker.Spec{ID: string(rune('a' + i)), Models: []string{"m"}, BlockSize: 16})
		w.Ranks[0].Slot = worker.Slot(i)
		all = append(all, w.Ranks...)
	}
	return all
}

func read(t *testing.T, path string) (all []Entry, err error) {
	t.Helper()
	r, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for {
		var e Entry
		if err := r.Next(&e); err == io.EOF {
			return all, nil
		} else if err != nil {
			return all, err
		}
		all = append(all, e)
	}
}

// record writes one file of choices, outcomes and events, and returns its name.
func record(t *testing.T, n int) string {
	t.Helper()
	ranks := fleet(3)
	rec := New(Options{Ranks: func() []*worker.Rank { return ranks }, Policy: "kv", Weights: map[string]float64{"overlap_weight": 1, "queue_weight": 2}})
	files, err := NewFiles(FilesOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rec.Start(files); err != nil {
		t.Fatal(err)
	}
	if _, err := rec.Start(files); !errors.Is(err, ErrBusy) {
		t.Errorf("a second recording: %v, want ErrBusy", err)
	}
	for i := range n {
		seqs := []blockhash.Seq{1, 2, blockhash.Seq(i)}
		rec.Stored(ranks[i%3], &kvindex.Stored{Tier: kvindex.Host, Salt: 9, HasParent: i%2 == 0, Parent: 77,
			Engine: []kvindex.EngineHash{5, 6}, Local: []blockhash.Local{7, blockhash.Local(i)}})
		rec.RecordChoice(&schedule.Query{Leg: schedule.PrefillLeg, Candidates: ranks, PromptTokens: 50, MaxTokens: 7, RequestID: "secret-id", Attempt: 1},
			schedule.Choice{Rank: ranks[1], CachedTokens: 32, OverlapBlocks: 2, Cost: 1.5}, seqs, 16, true)
		seqs[0] = 99 // no effect: the Recorder has copied them
		rec.RequestEnded("secret-id", schedule.Outcome{Status: 200, CachedTokens: -1, PromptTokens: 50, OutputTokens: 3, TTFT: time.Millisecond, Total: time.Second})
	}
	rec.Removed(ranks[0], kvindex.Device, []kvindex.EngineHash{5})
	rec.Cleared(ranks[2])
	rec.RankRemoved(ranks[2])
	rec.RecordChoice(&schedule.Query{Candidates: ranks[:1], RequestID: "x", Attempt: 1}, schedule.Choice{}, nil, 16, false)
	if err := rec.Close(); err != nil {
		t.Fatal(err)
	}
	if entries, dropped, _ := rec.Counts(); entries != uint64(3*n+4) || dropped != 0 {
		t.Errorf("%d entries, %d dropped, want %d and 0", entries, dropped, 3*n+4)
	}
	return files.Names()[0]
}

func TestRoundTrip(t *testing.T) {
	path := record(t, 2)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
	}
	raw, _ := os.ReadFile(path)
	if bytes.Contains(raw, []byte("secret-id")) {
		t.Error("a request's id stands in the file")
	}
	all, err := read(t, path)
	if err != nil {
		t.Fatal(err)
	}
	var kinds []Kind
	for i := range all {
		kinds = append(kinds, all[i].Kind)
		if time.Since(all[i].At) > time.Minute {
			t.Errorf("entry %d is of %v", i, all[i].At)
		}
	}
	if all[0].Kind != RecordingInfo || all[0].Recording == 0 {
		t.Fatalf("it begins with %+v, want the recording's number", all[0])
	}
	kinds, all = kinds[1:], all[1:]
	want := []Kind{Settings, RankAdded, RankAdded, RankAdded, Stored, Pool, Chosen, Ended, Stored, Chosen, Ended, Removed, Cleared, RankRemoved, Pool, Chosen}
	if !slices.Equal(kinds, want) {
		t.Fatalf("kinds %v, want %v", kinds, want)
	}
	e := all[9] // the second choice
	e.At = time.Time{}
	wantChosen := Entry{Kind: Chosen, Slot: 1, Request: requestHash("secret-id"), Leg: schedule.PrefillLeg, Attempt: 1, Prompt: 50, Output: 7,
		Found: true, Predicted: 32, Overlap: 2, Cost: 1.5, Exact: true, BlockSize: 16, Seqs: []blockhash.Seq{1, 2, 1},
		Engine: nil, Local: nil}
	if e.Engine, e.Local, e.Slots = nil, nil, nil; !reflect.DeepEqual(e, wantChosen) {
		t.Errorf("choice\n got %+v\nwant %+v", e, wantChosen)
	}
	if s := all[0]; s.Policy != "kv" || len(s.Weights) != 2 || s.Weights["queue_weight"] != 2 {
		t.Errorf("settings %+v", s)
	}
	if s := all[8]; s.Slot != 1 || s.Tier != kvindex.Host || s.Salt != 9 || s.HasParent || s.Parent != 77 ||
		!slices.Equal(s.Engine, []kvindex.EngineHash{5, 6}) || !slices.Equal(s.Local, []blockhash.Local{7, 1}) {
		t.Errorf("store %+v", s)
	}
	if j := all[2]; j.Rank.Worker != "b" || j.BlockSize != 16 || j.Model != "m" || j.WorkerRanks != 1 {
		t.Errorf("joined %+v", j)
	}
	if p := all[5]; !slices.Equal(p.Slots, []worker.Slot{0, 1, 2}) || all[6].Pool != p.Pool || all[15].Pool != all[14].Pool || all[15].Found {
		t.Errorf("pools %+v, %+v", p, all[15])
	}
	if o := all[7]; o.Status != 200 || o.Cached != -1 || o.PromptTokens != 50 || o.OutputTokens != 3 || o.TTFT != time.Millisecond || o.Total != time.Second {
		t.Errorf("outcome %+v", o)
	}
}

func TestInvalidFiles(t *testing.T) {
	good, err := os.ReadFile(record(t, 50))
	if err != nil {
		t.Fatal(err)
	}
	try := func(name string, b []byte, want error) {
		t.Helper()
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := read(t, path)
		if !errors.Is(err, want) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want %v and the file's name", name, err, want)
		}
	}
	try("empty", nil, ErrFormat)
	try("foreign", []byte("listen: 127.0.0.1:8080\n"), ErrFormat)
	newer := bytes.Clone(good)
	newer[8] = 9
	try("newer", newer, ErrVersion)
	try("header", good[:12], ErrTruncated)
	try("longer", append(bytes.Clone(good), 'x'), ErrCorrupted)
	whole := map[int]bool{} // offsets at the end of a frame, where only the end frame is missing
	for n := headerSize; n < len(good); n += frameHeadSize + int(binary.LittleEndian.Uint32(good[n+4:])) {
		whole[n] = true
	}
	step := 1
	if testing.Short() {
		step = 13
	}
	for n := headerSize; n < len(good); n += step {
		want := ErrTruncated
		if whole[n] {
			want = ErrUnfinished
		}
		try("cut", good[:n], want)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 / step {
		bad := bytes.Clone(good)
		bad[headerSize+rng.IntN(len(bad)-headerSize)] ^= 1 << rng.IntN(8)
		path := filepath.Join(t.TempDir(), "bad")
		os.WriteFile(path, bad, 0o600)
		if _, err := read(t, path); err == nil {
			t.Fatal("a flipped bit was not noticed")
		}
	}
}

func FuzzEntries(f *testing.F) {
	for _, e := range []Entry{{Kind: Settings, Policy: "kv"}, {Kind: RankAdded, Rank: worker.ID{Worker: "w", Rank: 2}},
		{Kind: Stored, Engine: []kvindex.EngineHash{1}, Local: []blockhash.Local{2}}, {Kind: Chosen, Seqs: []blockhash.Seq{3}}, {Kind: DroppedEntries, Count: 9}, {Kind: RecordingInfo, Recording: 7}} {
		f.Add(e.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c := entryReader{b: b}
		var e Entry
		for len(c.b) > 0 && c.read(&e) == nil {
			var again Entry
			back := entryReader{b: e.Append(nil)}
			if err := back.read(&again); err != nil || len(again.Seqs) != len(e.Seqs) || again.Kind != e.Kind {
				t.Fatalf("%+v came back as %+v, %v", e, again, err)
			}
		}
	})
}

// slowSink is a Sink that writes slowly.
type slowSink struct {
	mu   sync.Mutex
	wait chan struct{}
	got  [][]byte
}

func (s *slowSink) Frame(_ bool, frame []byte) error {
	<-s.wait
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, bytes.Clone(frame))
	return nil
}

func (s *slowSink) Close() error { return nil }

// TestSlowSinkDoesNotBlock: a sink that hangs costs entries but never delays callers; the
// recording contains the number of dropped entries.
func TestSlowSinkDoesNotBlock(t *testing.T) {
	ranks := fleet(2)
	rec := New(Options{Ranks: func() []*worker.Rank { return ranks }, QueueBytes: 1 << 20})
	sink := &slowSink{wait: make(chan struct{})}
	if _, err := rec.Start(sink); err != nil {
		t.Fatal(err)
	}
	seqs := make([]blockhash.Seq, 1024)
	for i := range seqs {
		seqs[i] = blockhash.Seq(rand.Uint64())
	}
	q := &schedule.Query{Candidates: ranks, RequestID: "r"}
	const n = 2000
	var worst time.Duration
	for range n {
		start := time.Now()
		rec.RecordChoice(q, schedule.Choice{Rank: ranks[0]}, seqs, 16, true)
		worst = max(worst, time.Since(start))
	}
	if worst > 2*time.Second {
		t.Errorf("one entry took %v", worst)
	}
	_, dropped, _ := rec.Counts()
	if dropped < n/2 {
		t.Errorf("%d of %d dropped; the queue is not bounded", dropped, n)
	}
	close(sink.wait)
	if err := rec.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "f")
	os.WriteFile(path, append(append(fileHeader(), bytes.Join(sink.got, nil)...), appendFrame(nil, frameEnd, nil, nil)...), 0o600)
	all, err := read(t, path)
	if err != nil {
		t.Fatal(err)
	}
	chosen, reported := 0, uint64(0)
	for i := range all {
		switch all[i].Kind {
		case Chosen:
			chosen++
		case DroppedEntries:
			reported += all[i].Count
		}
	}
	if chosen+int(reported) != n {
		t.Errorf("%d written and %d said to be dropped, of %d", chosen, reported, n)
	}
}

type failingSink struct{ slowSink }

func (*failingSink) Frame(bool, []byte) error { return errors.New("disk full") }

func TestFailedSinkEndsRecording(t *testing.T) {
	rec := New(Options{})
	g, err := rec.Start(&failingSink{})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-g.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("it goes on")
	}
	if rec.Active() {
		t.Error("it is still in progress")
	}
	if err := g.Stop(); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("stopped with %v", err)
	}
}

// TestFilesAreRotated: each file of a recording is readable without the others, and their total
// size is bounded.
func TestFilesAreRotated(t *testing.T) {
	ranks := fleet(2)
	dir := t.TempDir()
	keep := filepath.Join(dir, "notes.txt")
	os.WriteFile(keep, []byte("mine"), 0o600)
	files, err := NewFiles(FilesOptions{Dir: dir, MaxFile: 1 << 20, MaxTotal: 48 << 20})
	if err != nil {
		t.Fatal(err)
	}
	rec := New(Options{Ranks: func() []*worker.Rank { return ranks }})
	g, err := rec.Start(files)
	if err != nil {
		t.Fatal(err)
	}
	seqs := make([]blockhash.Seq, 4096)
	q := &schedule.Query{Candidates: ranks, RequestID: "r"}
	for n := 0; n < 2000; n++ {
		for i := range seqs {
			seqs[i] = blockhash.Seq(rand.Uint64())
		}
		rec.RecordChoice(q, schedule.Choice{Rank: ranks[0]}, seqs, 16, true)
		testwait.Until(t, "at most 500 are queued", func() bool { e, d, _ := rec.Counts(); return uint64(n) <= e+d+500 })
	}
	if err := g.Stop(); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*.rec"))
	total := int64(0)
	for _, f := range left {
		info, _ := os.Stat(f)
		total += info.Size()
		all, err := read(t, f)
		if err != nil {
			t.Fatal(err)
		}
		if all[0].Kind != RecordingInfo || all[1].Kind != Settings || all[2].Kind != RankAdded {
			t.Errorf("%s begins with %v, %v and %v", f, all[0].Kind, all[1].Kind, all[2].Kind)
		}
		pools := map[uint64]bool{}
		for i := range all {
			if all[i].Kind == Pool {
				pools[all[i].Pool] = true
			}
			if all[i].Kind == Chosen && !pools[all[i].Pool] {
				t.Fatalf("%s: a choice from pool %d, which the file does not define", f, all[i].Pool)
			}
		}
	}
	if len(left) < 2 || len(left) >= len(files.Names()) || total > 48<<20 {
		t.Errorf("%d files of %d are left with %d bytes", len(left), len(files.Names()), total)
	}
	if _, err := os.Stat(keep); err != nil {
		t.Error("a foreign file was deleted")
	}
}

func TestInactiveDoesNotAllocate(t *testing.T) {
	rec := New(Options{})
	ranks := fleet(1)
	q := &schedule.Query{Candidates: ranks, RequestID: "r"}
	seqs := make([]blockhash.Seq, 100)
	if n := testing.AllocsPerRun(100, func() {
		rec.RecordChoice(q, schedule.Choice{Rank: ranks[0]}, seqs, 16, true)
		rec.RequestEnded("r", schedule.Outcome{})
		rec.Cleared(ranks[0])
	}); n != 0 {
		t.Errorf("%v allocations while nobody records", n)
	}
}

func BenchmarkChose(b *testing.B) {
	for name, on := range map[string]bool{"on": true, "off": false} {
		b.Run("recording="+name, func(b *testing.B) {
			ranks := fleet(8)
			rec := New(Options{Ranks: func() []*worker.Rank { return ranks }})
			if on {
				sink := &slowSink{wait: make(chan struct{})}
				close(sink.wait)
				if _, err := rec.Start(sink); err != nil {
					b.Fatal(err)
				}
				defer rec.Close()
			}
			seqs := make([]blockhash.Seq, 256)
			q := &schedule.Query{Candidates: ranks, RequestID: "0123456789abcdef"}
			b.ReportAllocs()
			for b.Loop() {
				rec.RecordChoice(q, schedule.Choice{Rank: ranks[0]}, seqs, 16, true)
			}
			_, dropped, _ := rec.Counts()
			b.ReportMetric(float64(dropped)/float64(b.N), "dropped/op")
		})
	}
}
