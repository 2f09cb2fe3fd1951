package kvevents

// orphanRun is after how many stores in a row, none of which could be placed, a feed is said
// to yield nothing but orphans. A router that joins late misses the beginnings of some
// prompts, but hardly of so many one after the other.
const orphanRun = 32

// placed notes whether a store found its parent.
func (a *Applier) placed(orphan bool) {
	if !orphan {
		if a.orphans >= orphanRun {
			a.Rank.Orphans.Store(false)
		}
		a.orphans = 0
		return
	}
	if a.orphans++; a.orphans == orphanRun {
		a.Rank.Orphans.Store(true)
	}
}

// warnOfOrphans says once per run of orphans that the feed is of no use: the rank counts as
// one whose events are live, and yet no prompt is ever found on it.
func (f *feed) warnOfOrphans() {
	switch only := f.orphans >= orphanRun; {
	case only && !f.orphansTold:
		f.log.Warn("kv events: no block can be placed, for none of their parents is known; prompts are not found on this rank",
			"stores", f.orphans, "look", "the engine's parent_block_hash of a prompt's first block must be null or 0; an engine without replay must start after the router, or have its cache reset")
		f.orphansTold = true
	case !only && f.orphansTold:
		f.log.Info("kv events: blocks can be placed again")
		f.orphansTold = false
	}
}
