package harness

import (
	"fmt"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/worker"
)

// AwaitIndexed waits until the feeds have left the syncing state and the index has all blocks
// that the engines cache. An engine reports a block once for each copy, and the index counts the
// further reports as duplicates.
func AwaitIndexed(t *testing.T, r *Router, engines ...*sim.Engine) {
	t.Helper()
	testwait.UntilWithin(t, 5*time.Second, "the events have come", func() bool {
		cached, indexed := 0, float64(r.Index.Len())
		for _, e := range engines {
			cached += e.Stats().Sum().BlocksCached
		}
		for _, w := range r.Fleet.View().Workers {
			for _, k := range w.Ranks {
				if worker.FeedState(k.Feed.Load()) == worker.FeedSyncing {
					return false
				}
				indexed += r.Metric(fmt.Sprintf(`sluice_kv_feed_total{worker="%s",rank="%d",kind="duplicate"}`, k.ID.Worker, k.ID.Rank))
			}
		}
		return indexed >= float64(cached)
	})
}
