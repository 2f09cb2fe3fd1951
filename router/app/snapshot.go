package app

import (
	"fmt"
	"sync"
	"time"

	"sluice/router/kvevents"
	"sluice/router/recording/snapshot"
	"sluice/router/worker"
)

// newSnapshotKeeper creates the writer and reader of index snapshots; nil if index.snapshot is
// not set.
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

// defaultSnapshotProof is the value of Options.SnapshotProof if that is zero.
const defaultSnapshotProof = time.Second

// restore restores the blocks of a joining worker's ranks from the last snapshot. It handles
// the ranks concurrently, because an engine takes up to 100 ms to answer for each.
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

// restoreRank restores a joining rank's blocks from the last snapshot and returns the position
// at which its feed resumes. It returns nil if the snapshot has nothing of the rank or the
// engine does not prove that it is still the same process.
func (r *Router) restoreRank(src kvevents.Source) *kvevents.Position {
	pos, ok := r.snapshots.Position(src.Rank.ID, src.Model)
	if !ok {
		return nil
	}
	if err := r.feeds.VerifyPosition(src, &pos, r.snapshotProof); err != nil {
		r.log.Info("the snapshot's blocks of a rank are not used", "rank", src.Rank.ID.String(), "reason", err)
		r.snapshots.Discard(src.Rank.ID)
		return nil
	}
	if pos, ok = r.snapshots.Restore(src.Rank, src.Model); !ok {
		return nil
	}
	return &pos
}

// allRanks returns the ranks of all workers in the fleet.
func (r *Router) allRanks() (all []*worker.Rank) {
	if r.fleet == nil {
		return nil
	}
	for _, w := range r.fleet.View().Workers {
		all = append(all, w.Ranks...)
	}
	return all
}
