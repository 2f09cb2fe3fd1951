package snapshot

import (
	"errors"
	"io/fs"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/kvevents"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Options of a Keeper. Path, Index and Ranks are required.
type Options struct {
	Path     string        // its folder is made when it is not there, mode 0700
	Interval time.Duration // between two snapshots [5m]
	// Pending is how long a rank of the last snapshot that has not joined again is
	// kept, and goes into the next ones [30m].
	Pending time.Duration
	Rate    int64         // bytes a second that are written, before compression [64 MiB]
	Index   kvindex.Index // must be an Exporter and an Importer
	// Ranks are those there are.
	Ranks func() []*worker.Rank
	// Position is how far a rank's feed has come: Feeds.Position.
	Position func(worker.ID) (kvevents.Position, bool)
	Log      *slog.Logger
}

// Keeper writes snapshots in the background and restores ranks from the last one.
type Keeper struct {
	opt    Options
	out    kvindex.Exporter
	in     kvindex.Importer
	last   *File // nil: there was none, or it was refused
	opened time.Time
	stop   chan struct{}
	done   chan struct{}
	once   sync.Once
	write  sync.Mutex

	written, failed, blocks, restored atomic.Uint64
	at                                atomic.Int64 // of the last snapshot, ns since 1970
}

// New reads the snapshot at opt.Path, where there is one, and starts to write
// new ones. A file that cannot be used is logged with its name and what is wrong,
// and the router starts without it; an error means that no snapshot could ever be
// written.
func New(opt Options) (*Keeper, error) {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.Interval <= 0 {
		opt.Interval = 5 * time.Minute
	}
	if opt.Pending <= 0 {
		opt.Pending = 30 * time.Minute
	}
	if opt.Rate <= 0 {
		opt.Rate = 64 << 20
	}
	k := &Keeper{opt: opt, stop: make(chan struct{}), done: make(chan struct{}), opened: time.Now()}
	var can bool
	if k.out, can = opt.Index.(kvindex.Exporter); can {
		k.in, can = opt.Index.(kvindex.Importer)
	}
	if !can {
		return nil, errors.New("snapshot: this index cannot be written down")
	}
	if err := writable(opt.Path); err != nil {
		opt.Log.Error("no snapshot of the index can be written as things are", "err", err)
	}
	sweep(opt.Path)
	last, err := Open(opt.Path)
	switch {
	case err == nil:
		k.last = last
		opt.Log.Info("snapshot of the index found", "file", opt.Path, "ranks", len(last.Ranks()))
	case errors.Is(err, fs.ErrNotExist):
	default:
		opt.Log.Error("the snapshot of the index is not used", "err", err)
	}
	go k.run()
	return k, nil
}

func (k *Keeper) run() {
	defer close(k.done)
	tick := time.NewTicker(k.opt.Interval)
	defer tick.Stop()
	for {
		select {
		case <-k.stop:
			return
		case <-tick.C:
			k.Write()
		}
	}
}

// Position is what the snapshot says of a rank that joins; false where it says
// nothing, or the rank has another model now.
func (k *Keeper) Position(id worker.ID, model string) (kvevents.Position, bool) {
	if k.last == nil {
		return kvevents.Position{}, false
	}
	k.last.mu.Lock()
	defer k.last.mu.Unlock()
	p, ok := k.last.part[id]
	return p.meta.Position, ok && p.meta.Model == model
}

// Drop forgets what the snapshot has of a rank: its engine is not the same.
func (k *Keeper) Drop(id worker.ID) {
	if k.last != nil {
		k.last.mu.Lock()
		k.last.take(id)
		k.last.mu.Unlock()
	}
}

// Restore puts a joining rank's blocks back into the index and gives the position
// that its feed is to go on from; ok is false where there is nothing to go on
// from, and the index then holds nothing of the rank. Call it before the feed
// starts and once the engine has proven itself (Feeds.Prove); the blocks are true
// only if that feed is given the position.
func (k *Keeper) Restore(r *worker.Rank, model string) (pos kvevents.Position, ok bool) {
	if k.last == nil {
		return pos, false
	}
	m, blocks, ok, err := k.last.Restore(r.ID, r.Slot, model, k.in)
	if err != nil {
		k.opt.Index.Clear(r.Slot)
		k.opt.Log.Error("a rank of the snapshot is not used", "rank", r.ID.String(), "err", err)
		return pos, false
	}
	if ok {
		k.restored.Add(1)
		k.opt.Log.Info("blocks restored from the snapshot",
			"rank", r.ID.String(), "blocks", blocks, "from", m.Position.Next)
	}
	return m.Position, ok
}

// settle is how long a feed that is just catching up is waited for.
const settle = 500 * time.Millisecond

// ranks are those whose feed is contiguous, with their positions of now.
func (k *Keeper) ranks() (all []Rank) {
	until := time.Now().Add(settle)
	for _, r := range k.opt.Ranks() {
		pos, ok := k.opt.Position(r.ID)
		for !ok && time.Now().Before(until) && worker.FeedState(r.Feed.Load()) == worker.FeedSyncing {
			time.Sleep(10 * time.Millisecond)
			pos, ok = k.opt.Position(r.ID)
		}
		if ok {
			info := r.Worker.Info()
			all = append(all, Rank{Slot: r.Slot, Meta: Meta{Worker: r.ID.Worker, Rank: r.ID.Rank, Model: info.Base, Engine: info.Engine,
				Blocks: k.opt.Index.Held(r.Slot), Position: pos},
				there: func() bool { return slices.Contains(k.opt.Ranks(), r) }})
		}
	}
	return all
}

// Write writes a snapshot now. With no rank to write, nor any pending of the last
// one, the file is left as it is.
func (k *Keeper) Write() error {
	k.write.Lock()
	defer k.write.Unlock()
	if k.last != nil && time.Since(k.opened) > k.opt.Pending {
		k.last.Close()
	}
	ranks := k.ranks()
	if len(ranks) == 0 && (k.last == nil || len(k.last.Ranks()) == 0) {
		return nil
	}
	s, err := write(k.opt.Path, k.opt.Rate, k.out, ranks, k.last)
	if err != nil {
		k.failed.Add(1)
		k.opt.Log.Error("no snapshot of the index", "err", err)
		return err
	}
	k.written.Add(1)
	k.blocks.Store(uint64(s.Blocks))
	k.at.Store(time.Now().UnixNano())
	k.opt.Log.Info("snapshot of the index written", "file", k.opt.Path, "ranks", s.Ranks, "blocks", s.Blocks, "bytes", s.Bytes, "took", s.Took)
	return nil
}

// Counts are the snapshots written and failed since the start, the ranks restored
// and when the last snapshot was written (zero: never).
func (k *Keeper) Counts() (written, failed, restored uint64, at time.Time) {
	if ns := k.at.Load(); ns > 0 {
		at = time.Unix(0, ns)
	}
	return k.written.Load(), k.failed.Load(), k.restored.Load(), at
}

// Leave ends without a last snapshot: another process writes the file from now on.
func (k *Keeper) Leave() {
	k.once.Do(func() {
		close(k.stop)
		<-k.done
		if k.last != nil {
			k.last.Close()
		}
	})
}

// Close writes a last snapshot and ends. Call it while the feeds still run: with
// them goes what the index holds.
func (k *Keeper) Close() (err error) {
	k.once.Do(func() {
		close(k.stop)
		<-k.done
		k.opt.Rate = 1 << 40 // nobody is served any more
		err = k.Write()
		if k.last != nil {
			k.last.Close()
		}
	})
	return err
}
