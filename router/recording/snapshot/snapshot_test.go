package snapshot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvevents"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// testFleet is a set of ranks that hold chains, some of them identical.
type testFleet struct {
	index   kvindex.Index
	ranks   []*worker.Rank
	prompts [][]blockhash.Seq
}

func newTestFleet(t *testing.T, ranks, chains, depth int) *testFleet {
	t.Helper()
	h := &testFleet{index: kvindex.New(kvindex.Options{})}
	rng := rand.New(rand.NewPCG(7, 8))
	for i := range ranks {
		w := worker.New(worker.Spec{ID: string(rune('a' + i)), Models: []string{"m"}})
		w.Ranks[0].Slot = worker.Slot(10 + i)
		w.Ranks[0].Feed.Store(uint32(worker.FeedLive))
		h.ranks = append(h.ranks, w.Ranks[0])
	}
	for c := range chains {
		ev := kvindex.Stored{Salt: 3}
		var prompt []blockhash.Seq
		for i := range depth {
			l := blockhash.Local(rng.Uint64())
			ev.Local = append(ev.Local, l)
			if i == 0 {
				prompt = append(prompt, blockhash.First(3, l))
			} else {
				prompt = append(prompt, blockhash.Next(prompt[i-1], l))
			}
		}
		h.prompts = append(h.prompts, prompt)
		for r := range ranks {
			if (c+r)%3 == 0 {
				continue
			}
			ev.Engine = nil
			for range depth {
				ev.Engine = append(ev.Engine, kvindex.EngineHash(rng.Uint64()))
			}
			ev.Slot, ev.Tier = h.ranks[r].Slot, kvindex.Tier(c%2)
			if res := h.index.Store(&ev); res.Added != depth {
				t.Fatalf("stored %+v", res)
			}
		}
	}
	return h
}

func (h *testFleet) list() (all []Rank) {
	for i, r := range h.ranks {
		all = append(all, Rank{Slot: r.Slot, Meta: Meta{Worker: r.ID.Worker, Rank: r.ID.Rank, Model: "m", Engine: "vllm", Blocks: h.index.CachedBlocks(r.Slot),
			Position: kvevents.Position{Next: uint64(100 + i), LastHash: uint64(i), BlockSize: 16}}})
	}
	return all
}

// same compares the overlap of every prompt on every rank; slots may differ.
func same(t *testing.T, want, got kvindex.Index, from, to worker.Slot, prompts [][]blockhash.Seq) {
	t.Helper()
	var a, b kvindex.Overlap
	for i, p := range prompts {
		want.Find(p, &a)
		got.Find(p, &b)
		if a.Depth(from) != b.Depth(to) {
			t.Fatalf("prompt %d: depth %d, want %d", i, b.Depth(to), a.Depth(from))
		}
	}
	if want.CachedBlocks(from) != got.CachedBlocks(to) {
		t.Fatalf("%d held, want %d", got.CachedBlocks(to), want.CachedBlocks(from))
	}
}

func TestRoundTrip(t *testing.T) {
	h := newTestFleet(t, 5, 60, 40)
	path := filepath.Join(t.TempDir(), "index.snap")
	s, err := write(path, 0, h.index.(kvindex.Exporter), h.list(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if s.Ranks != 5 || s.Blocks != h.index.Len() {
		t.Errorf("wrote %+v of %d blocks", s, h.index.Len())
	}
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 || info.Size() != s.Bytes {
		t.Errorf("%v, %d bytes, said %d", info.Mode(), info.Size(), s.Bytes)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ix := kvindex.New(kvindex.Options{})
	for i, r := range h.ranks {
		slot := worker.Slot(200 - i) // other slots than before
		m, blocks, ok, err := f.Restore(r.ID, slot, "m", ix.(kvindex.Importer))
		if err != nil || !ok || m.Position.Next != uint64(100+i) || m.Position.BlockSize != 16 || blocks != h.index.CachedBlocks(r.Slot) {
			t.Fatalf("%v: %+v, %d blocks, %v, %v", r.ID, m, blocks, ok, err)
		}
		same(t, h.index, ix, r.Slot, slot, h.prompts)
		// Engine hashes are restored, too: a removal finds its block.
		if _, _, ok, _ := f.Restore(r.ID, slot, "m", ix.(kvindex.Importer)); ok {
			t.Error("a rank was restored twice")
		}
	}
	if ix.Len() != h.index.Len() {
		t.Errorf("%d entries, want %d", ix.Len(), h.index.Len())
	}
}

func TestOnlyMatchingRankIsRestored(t *testing.T) {
	h := newTestFleet(t, 2, 9, 8)
	path := filepath.Join(t.TempDir(), "index.snap")
	if _, err := write(path, 0, h.index.(kvindex.Exporter), h.list(), nil); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ix := kvindex.New(kvindex.Options{})
	for _, try := range []struct {
		id    worker.ID
		model string
	}{{worker.ID{Worker: "a", Rank: 1}, "m"}, {worker.ID{Worker: "z"}, "m"}, {worker.ID{Worker: "b"}, "another"}} {
		if _, n, ok, err := f.Restore(try.id, 0, try.model, ix.(kvindex.Importer)); ok || n != 0 || err != nil || ix.Len() != 0 {
			t.Errorf("%v: %d blocks, %v, %v", try, n, ok, err)
		}
	}
}

func TestInvalidFiles(t *testing.T) {
	h := newTestFleet(t, 2, 6, 5)
	dir := t.TempDir()
	path := filepath.Join(dir, "index.snap")
	if _, err := write(path, 0, h.index.(kvindex.Exporter), h.list(), nil); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	try := func(name string, b []byte, want error) {
		t.Helper()
		path := filepath.Join(dir, name)
		os.WriteFile(path, b, 0o600)
		f, err := Open(path)
		if err == nil {
			f.Close()
		}
		if !errors.Is(err, want) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want %v and the file's name", name, err, want)
		}
	}
	try("empty", nil, ErrFormat)
	try("foreign", []byte("%PDF-1.4 and so on"), ErrFormat)
	step := 1
	if testing.Short() {
		step = 13
	}
	for n := headerSize; n < len(good); n += step {
		try("cut", good[:n], ErrTruncated)
	}
	try("header-only", good[:10], ErrTruncated)
	try("longer", append(bytes.Clone(good), 0), ErrCorrupted)
	newer := bytes.Clone(good)
	newer[8]++
	try("newer", newer, ErrVersion)
	for bit := headerSize * 8; bit < len(good)*8; bit += 7 * step {
		bad := bytes.Clone(good)
		bad[bit/8] ^= 1 << (bit % 8)
		os.WriteFile(path, bad, 0o600)
		if f, err := Open(path); err == nil {
			f.Close()
			t.Fatalf("flipped bit %d was not noticed", bit)
		}
	}
	// Valid sections of another file or in another order.
	one := sectionHead + int(binary.LittleEndian.Uint32(good[headerSize+4:]))
	try("shortened", append(bytes.Clone(good[:headerSize]), good[headerSize+one:]...), ErrCorrupted)
	// A missing chains section: every section is valid, and only the final checksum shows the
	// loss.
	two := one + sectionHead + int(binary.LittleEndian.Uint32(good[headerSize+one+4:]))
	try("bereft", append(bytes.Clone(good[:headerSize+one]), good[headerSize+two:]...), ErrCorrupted)
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{pipe, dir, "/dev/null"} {
		if _, err := Open(name); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want %v and its name", name, err, ErrFormat)
		}
	}
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestKeeperIgnoresBadFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "index.snap")
	os.WriteFile(path, []byte("SLUICEKVgarbage"), 0o600)
	h := newTestFleet(t, 1, 3, 4)
	k, err := New(Options{Path: path, Index: h.index, Ranks: func() []*worker.Rank { return h.ranks }, Interval: time.Hour,
		Position: func(worker.ID) (kvevents.Position, bool) { return kvevents.Position{Next: 1}, true }})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := k.Restore(h.ranks[0], "m"); ok {
		t.Error("restored from garbage")
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatalf("the end's snapshot did not replace it: %v", err)
	}
	f.Close()
}

// TestTheFolderOfASnapshot: a missing directory is created; a failure to create it is logged at
// the start.
func TestTheFolderOfASnapshot(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{filepath.Join(dir, "a", "b", "index.snap"): "", filepath.Join(file, "index.snap"): "cannot create the directory"} {
		var log bytes.Buffer
		h := newTestFleet(t, 1, 3, 4)
		k, err := New(Options{Path: path, Index: h.index, Ranks: func() []*worker.Rank { return h.ranks }, Interval: time.Hour, Log: slog.New(slog.NewTextHandler(&log, nil)),
			Position: func(worker.ID) (kvevents.Position, bool) { return kvevents.Position{Next: 1}, true }})
		if err != nil {
			t.Fatal(err)
		}
		if logged := log.String(); want == "" && logged != "" || !strings.Contains(logged, want) {
			t.Errorf("%s: logged at the start %q, want %q", path, logged, want)
		}
		if err := k.Close(); (err == nil) != (want == "") {
			t.Errorf("%s: written at the end: %v", path, err)
		}
	}
}

// TestPendingRanksAreCopied: the next snapshot preserves ranks that have not joined again, and
// without a rank to write the old snapshot stays.
func TestPendingRanksAreCopied(t *testing.T) {
	h := newTestFleet(t, 3, 30, 10)
	path := filepath.Join(t.TempDir(), "index.snap")
	if _, err := write(path, 0, h.index.(kvindex.Exporter), h.list(), nil); err != nil {
		t.Fatal(err)
	}
	live := map[string]bool{}
	ix := kvindex.New(kvindex.Options{})
	open := func() *Keeper {
		k, err := New(Options{Path: path, Index: ix, Ranks: func() []*worker.Rank { return h.ranks }, Interval: time.Hour,
			Position: func(id worker.ID) (kvevents.Position, bool) { return kvevents.Position{Next: 500}, live[id.Worker] }})
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	k := open()
	if _, ok := k.Restore(h.ranks[1], "m"); !ok {
		t.Fatal("not restored")
	}
	live["b"] = true
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, next := range []uint64{100, 500, 102} {
		fresh := kvindex.New(kvindex.Options{})
		m, _, ok, err := f.Restore(h.ranks[i].ID, 5, "m", fresh.(kvindex.Importer))
		if err != nil || !ok || m.Position.Next != next {
			t.Errorf("%v: %+v, %v, %v", h.ranks[i].ID, m, ok, err)
		}
		same(t, h.index, fresh, h.ranks[i].Slot, 5, h.prompts)
	}
	f.Close()
	before, _ := os.ReadFile(path)
	clear(live)
	k = open()
	k.previous.Close()
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Error("with nothing to write, the file was changed")
	}
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*"))
	if len(left) != 0 {
		t.Errorf("temporary files are left: %v", left)
	}
}

// TestFullDiskKeepsOldSnapshot: on a full disk the new snapshot fails and the old one stays.
func TestFullDiskKeepsOldSnapshot(t *testing.T) {
	h := newTestFleet(t, 2, 30, 40)
	path := filepath.Join(t.TempDir(), "index.snap")
	if _, err := write(path, 0, h.index.(kvindex.Exporter), h.list(), nil); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// A limit on the size of files fails like a full disk, in the middle of a write.
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	limit := was
	limit.Cur = uint64(len(before) / 2)
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	_, err = write(path, 0, h.index.(kvindex.Exporter), h.list(), nil)
	if e := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was); e != nil {
		t.Fatal(e)
	}
	if !errors.Is(err, syscall.EFBIG) {
		t.Errorf("%v, want that the file grew too large", err)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Errorf("the old snapshot is gone: %d bytes, want %d", len(after), len(before))
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) != 0 {
		t.Errorf("temporary files are left: %v", left)
	}
}

// TestAbandonedFilesAreRemoved: the next start removes the temporary files of killed routers,
// but not those that another process is writing.
func TestAbandonedFilesAreRemoved(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "index.snap")
	past := time.Now().Add(-2 * abandonedAge)
	for name, at := range map[string]time.Time{".index.snap-1": past, ".index.snap-2": time.Now(), ".other.snap-1": past} {
		if err := errors.Join(os.WriteFile(filepath.Join(dir, name), nil, 0o600), os.Chtimes(filepath.Join(dir, name), at, at)); err != nil {
			t.Fatal(err)
		}
	}
	k, err := New(Options{Path: path, Index: kvindex.New(kvindex.Options{}), Ranks: func() []*worker.Rank { return nil }, Interval: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	left, _ := filepath.Glob(filepath.Join(dir, ".*"))
	if len(left) != 2 || filepath.Base(left[0]) != ".index.snap-2" || filepath.Base(left[1]) != ".other.snap-1" {
		t.Errorf("left: %v", left)
	}
}

// TestSlotReusedDuringExport: a rank is removed while the snapshot is written and its slot goes
// to another rank. The other rank's blocks must not be restored as those of the first.
func TestSlotReusedDuringExport(t *testing.T) {
	h := newTestFleet(t, 3, 30, 40)
	path := filepath.Join(t.TempDir(), "index.snap")
	now := h.ranks
	k, err := New(Options{Path: path, Index: &exportHook{Index: h.index, slot: h.ranks[1].Slot, fn: func() {
		other := worker.New(worker.Spec{ID: "z", Models: []string{"m"}}).Ranks[0]
		other.Slot = h.ranks[1].Slot
		now = []*worker.Rank{h.ranks[0], h.ranks[2], other}
	}}, Ranks: func() []*worker.Rank { return now }, Interval: time.Hour,
		Position: func(worker.ID) (kvevents.Position, bool) { return kvevents.Position{Next: 1}, true }})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Write(); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if ids := f.Ranks(); len(ids) != 2 || ids[0] != h.ranks[0].ID || ids[1] != h.ranks[2].ID {
		t.Fatalf("%v are in the snapshot, want %v and %v", ids, h.ranks[0].ID, h.ranks[2].ID)
	}
	for i, r := range []*worker.Rank{h.ranks[0], h.ranks[2]} {
		ix := kvindex.New(kvindex.Options{})
		if _, _, ok, err := f.Restore(r.ID, worker.Slot(i), r.Worker.Info().Base, ix.(kvindex.Importer)); !ok || err != nil {
			t.Fatalf("%v: %v, %v", r.ID, ok, err)
		}
		same(t, h.index, ix, r.Slot, worker.Slot(i), h.prompts)
	}
}

// exportHook calls a function after a slot was exported.
type exportHook struct {
	kvindex.Index
	slot worker.Slot
	fn   func()
}

func (h *exportHook) Export(slot worker.Slot, yield func(*kvindex.Exported) bool) {
	h.Index.(kvindex.Exporter).Export(slot, yield)
	if slot == h.slot {
		h.fn()
	}
}

func (h *exportHook) Import(slot worker.Slot, x *kvindex.Exported) kvindex.StoreResult {
	return h.Index.(kvindex.Importer).Import(slot, x)
}

// TestWriteDoesNotBlock: events and readers proceed while a snapshot is written, and the
// snapshot contains the blocks held throughout.
func TestWriteDoesNotBlock(t *testing.T) {
	h := newTestFleet(t, 3, 400, 64)
	path := filepath.Join(t.TempDir(), "index.snap")
	var finds, stores atomic.Int64
	stop := make(chan struct{})
	done := make(chan struct{}, 2)
	go func() {
		defer func() { done <- struct{}{} }()
		var o kvindex.Overlap
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			h.index.Find(h.prompts[i%len(h.prompts)], &o)
			finds.Add(1)
		}
	}()
	go func() {
		defer func() { done <- struct{}{} }()
		rng := rand.New(rand.NewPCG(1, 1))
		for {
			select {
			case <-stop:
				return
			default:
			}
			ev := kvindex.Stored{Slot: h.ranks[0].Slot, Salt: 99}
			for range 16 {
				ev.Engine, ev.Local = append(ev.Engine, kvindex.EngineHash(rng.Uint64())), append(ev.Local, blockhash.Local(rng.Uint64()))
			}
			h.index.Store(&ev)
			h.index.Remove(ev.Slot, ev.Tier, ev.Engine)
			stores.Add(1)
		}
	}()
	for range 3 {
		f0, s0 := finds.Load(), stores.Load()
		s, err := write(path, 2<<20, h.index.(kvindex.Exporter), h.list(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if s.Duration < 200*time.Millisecond {
			t.Errorf("%d blocks took %v at 2 MiB a second", s.Blocks, s.Duration)
		}
		if finds.Load() == f0 || stores.Load() == s0 {
			t.Error("nobody else came to work")
		}
	}
	close(stop)
	<-done
	<-done
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ix := kvindex.New(kvindex.Options{})
	if _, _, ok, err := f.Restore(h.ranks[0].ID, 1, "m", ix.(kvindex.Importer)); !ok || err != nil {
		t.Fatal(ok, err)
	}
	var a, b kvindex.Overlap
	for _, p := range h.prompts {
		h.index.Find(p, &a)
		ix.Find(p, &b)
		if a.Depth(h.ranks[0].Slot) != b.Depth(1) {
			t.Fatalf("depth %d, want %d", b.Depth(1), a.Depth(h.ranks[0].Slot))
		}
	}
}

func FuzzChains(f *testing.F) {
	f.Add(appendChain(nil, &kvindex.Exported{Tier: 1, HasParent: true, Parent: 5, ParentSeq: 6, Engine: []kvindex.EngineHash{1}, Seqs: []blockhash.Seq{2}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var x kvindex.Exported
		for len(b) > 0 {
			rest, err := readChain(b, &x)
			if err != nil {
				return
			}
			if len(x.Engine) != len(x.Seqs) || len(rest) >= len(b) {
				t.Fatal("not one chain cut off")
			}
			b = rest
		}
	})
}
