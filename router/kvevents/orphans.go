package kvevents

// orphanThreshold is after how many stores in a row, none of which could be placed, a feed is said
// to yield nothing but orphans. A router that joins late misses the beginnings of some
// prompts, but hardly of so many one after the other.
const orphanThreshold = 32

// countOrphan notes whether a store found its parent.
func (a *Applier) countOrphan(orphan bool) {
	if !orphan {
		if a.orphans >= orphanThreshold {
			a.Rank.Orphans.Store(false)
		}
		a.orphans = 0
		return
	}
	if a.orphans++; a.orphans == orphanThreshold {
		a.Rank.Orphans.Store(true)
	}
}

// warnOrphans says once per run of orphans that the feed is of no use: the rank counts as
// one whose events are live, and yet no prompt is ever found on it.
func (f *feed) warnOrphans() {
	switch only := f.orphans >= orphanThreshold; {
	case only && !f.orphansWarned:
		f.log.Warn("kv events: no block can be placed, for none of their parents is known; prompts are not found on this rank",
			"stores", f.orphans, "look", "the engine's parent_block_hash of a prompt's first block must be null or 0; an engine without replay must start after the router, or have its cache reset")
		f.orphansWarned = true
	case !only && f.orphansWarned:
		f.log.Info("kv events: blocks can be placed again")
		f.orphansWarned = false
	}
}
