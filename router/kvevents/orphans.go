package kvevents

// orphanThreshold is the number of consecutive orphan stores after which a warning is logged. A
// router that starts late misses the beginnings of some prompts, but hardly of that many in a row.
const orphanThreshold = 32

// countOrphan counts consecutive stores without a known parent.
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

// warnOrphans logs once per series of orphans that the feed is useless: the rank's events are live,
// but no prompt is ever found on it.
func (f *feed) warnOrphans() {
	switch only := f.orphans >= orphanThreshold; {
	case only && !f.orphansWarned:
		f.log.Warn("kv events: cannot index any block because no parent is known; no prompt is found on this rank",
			"stores", f.orphans, "hint", "the engine's parent_block_hash of a prompt's first block must be null or 0; an engine without replay must start after the router, or its cache must be reset")
		f.orphansWarned = true
	case !only && f.orphansWarned:
		f.log.Info("kv events: blocks are indexed again")
		f.orphansWarned = false
	}
}
