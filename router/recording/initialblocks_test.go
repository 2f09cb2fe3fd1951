package recording

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// stored returns the event of a prompt and the hashes of its blocks.
func stored(slot worker.Slot, sid, n int) (*kvindex.Stored, []blockhash.Seq) {
	ev := &kvindex.Stored{Slot: slot, Salt: 1}
	var seqs []blockhash.Seq
	seq := blockhash.Seq(1)
	for i := range n {
		l := blockhash.Local(1000*sid + i)
		seq = blockhash.Next(seq, l)
		seqs = append(seqs, seq)
		ev.Engine, ev.Local = append(ev.Engine, kvindex.EngineHash(seq)), append(ev.Local, l)
	}
	return ev, seqs
}

// TestRecordingStartsWithInitialBlocks: an index rebuilt from a recording that began during
// changes equals the recorded index, with the blocks held before, added and removed.
func TestRecordingStartsWithInitialBlocks(t *testing.T) {
	ranks := fleet(3)
	ix := kvindex.New(kvindex.Options{})
	const prompts = 400
	for sid := range prompts {
		ev, _ := stored(worker.Slot(sid%3), sid, 20)
		ix.Store(ev)
	}
	written := make(chan struct{})
	rec := New(Options{Ranks: func() []*worker.Rank { return ranks }, QueueBytes: 1 << 30,
		Contents: func(rank *worker.Rank, yield func(bool, *kvindex.Exported) bool) {
			ix.(kvindex.Exporter).Export(rank.Slot, func(x *kvindex.Exported) bool { return yield(true, x) })
			if rank == ranks[2] {
				close(written)
			}
		}})
	dir := t.TempDir()
	files, err := NewFiles(FilesOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	var writers sync.WaitGroup
	begun := make(chan struct{})
	for _, rank := range ranks {
		writers.Go(func() {
			<-begun
			for sid := int(rank.Slot); sid < prompts; sid += 3 {
				ev, _ := stored(rank.Slot, sid, 20)
				if sid%2 == 0 {
					ix.Remove(rank.Slot, kvindex.Device, ev.Engine[10:])
					rec.Removed(rank, kvindex.Device, ev.Engine[10:])
				} else {
					ev, _ = stored(rank.Slot, prompts+sid, 20)
					ix.Store(ev)
					rec.Stored(rank, ev)
				}
			}
		})
	}
	g, err := rec.Start(files)
	if err != nil {
		t.Fatal(err)
	}
	close(begun)
	writers.Wait()
	select { // a recording that is stopped earlier lacks some of them
	case <-written:
	case <-time.After(20 * time.Second):
		t.Fatal("what is held is not written within 20 s")
	}
	if err := g.Stop(); err != nil {
		t.Fatal(err)
	}
	all, err := read(t, files.Names()[0])
	if err != nil {
		t.Fatal(err)
	}
	again, held := kvindex.New(kvindex.Options{}), 0
	for i := range all {
		switch e := &all[i]; e.Kind {
		case InitialBlocks:
			held += len(e.Seqs)
			again.(kvindex.Importer).Import(e.Slot, &kvindex.Exported{Tier: e.Tier, HasParent: e.HasParent, Parent: e.Parent, ParentSeq: e.ParentSeq, Engine: e.Engine, Seqs: e.Seqs})
		case Stored:
			again.Store(&kvindex.Stored{Slot: e.Slot, Tier: e.Tier, Salt: e.Salt, HasParent: e.HasParent, Parent: e.Parent, Engine: e.Engine, Local: e.Local})
		case Removed:
			again.Remove(e.Slot, e.Tier, e.Engine)
		case DroppedEntries, InitialSkipped:
			t.Fatalf("kind %d: %d", e.Kind, e.Count)
		}
	}
	if held < prompts*10 || again.Len() != ix.Len() {
		t.Fatalf("%d blocks held at the beginning; %d entries, the index has %d", held, again.Len(), ix.Len())
	}
	for _, rank := range ranks {
		want := map[kvindex.EngineHash]bool{}
		ix.(kvindex.Exporter).Export(rank.Slot, func(x *kvindex.Exported) bool {
			for _, h := range x.Engine {
				want[h] = true
			}
			return true
		})
		again.(kvindex.Exporter).Export(rank.Slot, func(x *kvindex.Exported) bool {
			for _, h := range x.Engine {
				if !want[h] {
					t.Fatalf("rank %v: block %x is held by the recording alone", rank.ID, h)
				}
				delete(want, h)
			}
			return true
		})
		if len(want) != 0 {
			t.Errorf("rank %v: %d blocks are missing", rank.ID, len(want))
		}
	}
}

// TestInitialBlocksAreBounded: with more initial blocks than the limit, every rank gets its
// share and the rest is counted.
func TestInitialBlocksAreBounded(t *testing.T) {
	ranks := fleet(2)
	rec := New(Options{Ranks: func() []*worker.Rank { return ranks }, MaxInitialBlocks: 100,
		Contents: func(rank *worker.Rank, yield func(bool, *kvindex.Exported) bool) {
			for range 20 {
				if !yield(false, &kvindex.Exported{Engine: make([]kvindex.EngineHash, 10), Seqs: make([]blockhash.Seq, 10)}) {
					return
				}
			}
		}})
	files, err := NewFiles(FilesOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rec.Start(files); err != nil {
		t.Fatal(err)
	}
	until := func(n uint64) {
		testwait.Until(t, fmt.Sprintf("%d entries", n), func() bool { e, _, _ := rec.Counts(); return e >= n })
	}
	until(10)
	rec.Cleared(ranks[0]) // recorded after all of them
	until(11)
	if err := rec.Close(); err != nil {
		t.Fatal(err)
	}
	all, err := read(t, files.Names()[0])
	if err != nil {
		t.Fatal(err)
	}
	var held [2]int
	over, last := uint64(0), Kind(0)
	for i := range all {
		if last = all[i].Kind; last == InitialBlocks {
			held[all[i].Slot] += len(all[i].Seqs)
		}
		if last == InitialSkipped {
			over += all[i].Count
		}
	}
	if held != [2]int{50, 50} || over != 300 || last != Cleared {
		t.Errorf("%v held, %d left out, the last entry of kind %d", held, over, last)
	}
}

type closedSink struct{ failingSink }

func (*closedSink) Frame(bool, []byte) error { return ErrReaderClosed }

// TestClosedReaderIsNoError: a recording whose reader disconnects does not log an error.
func TestClosedReaderIsNoError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	log, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	rec := New(Options{Log: slog.New(slog.NewTextHandler(log, nil))})
	g, err := rec.Start(&closedSink{})
	if err != nil {
		t.Fatal(err)
	}
	<-g.Done()
	text, _ := os.ReadFile(path)
	if lines := strings.Split(strings.TrimSpace(string(text)), "\n"); len(lines) != 1 || !slices.ContainsFunc(lines, func(s string) bool { return strings.Contains(s, "level=INFO") }) {
		t.Errorf("logged %q", lines)
	}
}
