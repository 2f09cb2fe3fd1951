package app

import (
	"fmt"
	"sync"
	"time"

	"sluice/router/kvevents"
	"sluice/router/recording/snapshot"
	"sluice/router/worker"
)

// newSnapshotKeeper makes the keeper of snapshots, where index.snapshot names a file.
func (r *Router) newSnapshotKeeper() (*snapshot.Keeper, error) {
	if r.cfg.Index.Snapshot == "" {
		return nil, nil
	}
	k, err := snapshot.New(snapshot.Options{
		Path: r.cfg.Index.Snapshot, Interval: r.cfg.Index.SnapshotInterval, Index: r.index, Position: r.feeds.Position, Log: r.log,
		Ranks: r.allRanks,
	})
	if err != nil {
		return nil, fmt.Errorf("index.snapshot: %w", err)
	}
	r.metrics.GaugeFunc(func() float64 { n, _, _, _ := k.Counts(); return float64(n) }, "sluice_kv_snapshots_total", "outcome", "written")
	r.metrics.GaugeFunc(func() float64 { _, n, _, _ := k.Counts(); return float64(n) }, "sluice_kv_snapshots_total", "outcome", "failed")
	r.metrics.GaugeFunc(func() float64 { _, _, n, _ := k.Counts(); return float64(n) }, "sluice_kv_snapshot_ranks_restored_total")
	r.metrics.GaugeFunc(func() float64 {
		_, _, _, at := k.Counts()
		if at.IsZero() {
			return 0
		}
		return float64(at.UnixNano()) / float64(time.Second)
	}, "sluice_kv_snapshot_timestamp_seconds")
	return k, nil
}

// defaultSnapshotProof is Options.SnapshotProof where that is zero.
const defaultSnapshotProof = time.Second

// restore puts back what the last snapshot has of a joining worker's ranks. They are
// asked side by side: an engine takes up to a tenth of a second to answer for each.
func (r *Router) restore(sources []kvevents.Source) {
	if r.snapshots == nil {
		return
	}
	var all sync.WaitGroup
	for i := range sources {
		all.Go(func() { sources[i].Resume = r.restoreRank(sources[i]) })
	}
	all.Wait()
}

// restoreRank puts back what the last snapshot has of a joining rank, and says where
// its feed is to go on; nil when there is nothing, or the engine is not the same.
func (r *Router) restoreRank(src kvevents.Source) *kvevents.Position {
	pos, ok := r.snapshots.Position(src.Rank.ID, src.Model)
	if !ok {
		return nil
	}
	if err := r.feeds.VerifyPosition(src, &pos, r.snapshotProof); err != nil {
		r.log.Info("the snapshot's blocks of a rank are not used", "rank", src.Rank.ID.String(), "why", err)
		r.snapshots.Discard(src.Rank.ID)
		return nil
	}
	if pos, ok = r.snapshots.Restore(src.Rank, src.Model); !ok {
		return nil
	}
	return &pos
}

// allRanks are the ranks of all workers there are.
func (r *Router) allRanks() (all []*worker.Rank) {
	if r.fleet == nil {
		return nil
	}
	for _, w := range r.fleet.View().Workers {
		all = append(all, w.Ranks...)
	}
	return all
}
