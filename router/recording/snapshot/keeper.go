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

// Options configures a Keeper. Path, Index and Ranks are required.
type Options struct {
	Path     string        // its directory is created with mode 0700 if it does not exist
	Interval time.Duration // between two snapshots [5m]
	// PendingTTL is how long a rank of the previous snapshot that has not joined again is
	// preserved and copied to new snapshots [30m].
	PendingTTL   time.Duration
	MaxWriteRate int64         // bytes per second before compression [64 MiB]
	Index        kvindex.Index // must implement Exporter and Importer
	// Ranks returns the current ranks.
	Ranks func() []*worker.Rank
	// Position returns the position of a rank's feed: Feeds.Position.
	Position func(worker.ID) (kvevents.Position, bool)
	Log      *slog.Logger
}

// Keeper writes snapshots in the background and restores ranks from the previous one.
type Keeper struct {
	opt      Options
	exporter kvindex.Exporter
	importer kvindex.Importer
	previous *File // nil: there was none, or it was rejected
	opened   time.Time
	stop     chan struct{}
	done     chan struct{}
	once     sync.Once
	write    sync.Mutex

	written, failed, blocks, restored atomic.Uint64
	lastWritten                       atomic.Int64 // time of the last snapshot, Unix nanoseconds
}

// New reads the snapshot at opt.Path, if there is one, and starts to write new ones. It logs an
// unusable file with its name and the cause, and the router starts without it. An error means
// that the Keeper could not write any snapshot.
func New(opt Options) (*Keeper, error) {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.Interval <= 0 {
		opt.Interval = 5 * time.Minute
	}
	if opt.PendingTTL <= 0 {
		opt.PendingTTL = 30 * time.Minute
	}
	if opt.MaxWriteRate <= 0 {
		opt.MaxWriteRate = 64 << 20
	}
	k := &Keeper{opt: opt, stop: make(chan struct{}), done: make(chan struct{}), opened: time.Now()}
	var can bool
	if k.exporter, can = opt.Index.(kvindex.Exporter); can {
		k.importer, can = opt.Index.(kvindex.Importer)
	}
	if !can {
		return nil, errors.New("snapshot: cannot write an index of this type")
	}
	if err := checkWritable(opt.Path); err != nil {
		opt.Log.Error("cannot write snapshots of the index", "error", err)
	}
	removeAbandoned(opt.Path)
	last, err := Open(opt.Path)
	switch {
	case err == nil:
		k.previous = last
		opt.Log.Info("snapshot of the index found", "file", opt.Path, "ranks", len(last.Ranks()))
	case errors.Is(err, fs.ErrNotExist):
	default:
		opt.Log.Error("cannot use the snapshot of the index; starting without it", "error", err)
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

// Position returns the position in the snapshot of a rank that joins. It returns false when the
// snapshot does not contain the rank or the rank's model has changed.
func (k *Keeper) Position(id worker.ID, model string) (kvevents.Position, bool) {
	if k.previous == nil {
		return kvevents.Position{}, false
	}
	k.previous.mu.Lock()
	defer k.previous.mu.Unlock()
	p, ok := k.previous.sections[id]
	return p.meta.Position, ok && p.meta.Model == model
}

// Discard removes a rank from the snapshot because its engine is a different one.
func (k *Keeper) Discard(id worker.ID) {
	if k.previous != nil {
		k.previous.mu.Lock()
		k.previous.extract(id)
		k.previous.mu.Unlock()
	}
}

// Restore puts a joining rank's blocks back into the index and returns the position from which
// its feed must continue. If ok is false there is no such position, and the index holds no
// blocks of the rank. Call Restore after the engine has proved its identity
// (Feeds.VerifyPosition) and before the feed starts. The blocks are correct only if the feed
// continues from pos.
func (k *Keeper) Restore(r *worker.Rank, model string) (pos kvevents.Position, ok bool) {
	if k.previous == nil {
		return pos, false
	}
	m, blocks, ok, err := k.previous.Restore(r.ID, r.Slot, model, k.importer)
	if err != nil {
		k.opt.Index.Clear(r.Slot)
		k.opt.Log.Error("cannot restore the blocks of a rank from the snapshot", "rank", r.ID.String(), "error", err)
		return pos, false
	}
	if ok {
		k.restored.Add(1)
		k.opt.Log.Info("blocks restored from the snapshot",
			"rank", r.ID.String(), "blocks", blocks, "sequence", m.Position.Next)
	}
	return m.Position, ok
}

// settleTimeout bounds the wait for a feed that is catching up.
const settleTimeout = 500 * time.Millisecond

// readyRanks returns the ranks whose feed is contiguous, with their current positions.
func (k *Keeper) readyRanks() (all []Rank) {
	until := time.Now().Add(settleTimeout)
	for _, r := range k.opt.Ranks() {
		pos, ok := k.opt.Position(r.ID)
		for !ok && time.Now().Before(until) && worker.FeedState(r.Feed.Load()) == worker.FeedSyncing {
			time.Sleep(10 * time.Millisecond)
			pos, ok = k.opt.Position(r.ID)
		}
		if ok {
			info := r.Worker.Info()
			all = append(all, Rank{Slot: r.Slot, Meta: Meta{Worker: r.ID.Worker, Rank: r.ID.Rank, Model: info.Base, Engine: info.Engine,
				Blocks: k.opt.Index.CachedBlocks(r.Slot), Position: pos},
				stillValid: func() bool { return slices.Contains(k.opt.Ranks(), r) }})
		}
	}
	return all
}

// Write writes a snapshot now. It leaves the file unchanged when there is no rank to write and
// none pending from the previous snapshot.
func (k *Keeper) Write() error {
	k.write.Lock()
	defer k.write.Unlock()
	if k.previous != nil && time.Since(k.opened) > k.opt.PendingTTL {
		k.previous.Close()
	}
	ranks := k.readyRanks()
	if len(ranks) == 0 && (k.previous == nil || len(k.previous.Ranks()) == 0) {
		return nil
	}
	s, err := write(k.opt.Path, k.opt.MaxWriteRate, k.exporter, ranks, k.previous)
	if err != nil {
		k.failed.Add(1)
		k.opt.Log.Error("cannot write a snapshot of the index", "error", err)
		return err
	}
	k.written.Add(1)
	k.blocks.Store(uint64(s.Blocks))
	k.lastWritten.Store(time.Now().UnixNano())
	k.opt.Log.Info("snapshot of the index written", "file", k.opt.Path, "ranks", s.Ranks, "blocks", s.Blocks, "bytes", s.Bytes, "duration", s.Duration)
	return nil
}

// Counts returns the snapshots written and failed and the ranks restored since the start, and
// the time of the last snapshot (zero: none).
func (k *Keeper) Counts() (written, failed, restored uint64, at time.Time) {
	if ns := k.lastWritten.Load(); ns > 0 {
		at = time.Unix(0, ns)
	}
	return k.written.Load(), k.failed.Load(), k.restored.Load(), at
}

// CloseWithoutWrite stops the Keeper without a last snapshot, because another process now
// writes the file.
func (k *Keeper) CloseWithoutWrite() {
	k.once.Do(func() {
		close(k.stop)
		<-k.done
		if k.previous != nil {
			k.previous.Close()
		}
	})
}

// Close writes a last snapshot and stops the Keeper. Call it before the feeds stop, because the
// index loses its blocks with them.
func (k *Keeper) Close() (err error) {
	k.once.Do(func() {
		close(k.stop)
		<-k.done
		k.opt.MaxWriteRate = 1 << 40 // no request is served any more
		err = k.Write()
		if k.previous != nil {
			k.previous.Close()
		}
	})
	return err
}
