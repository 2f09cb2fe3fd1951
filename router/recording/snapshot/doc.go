// Package snapshot preserves the KV index across a restart of the router. It writes the blocks
// of each rank, with the position of the rank's event feed, to a file at an interval and at a
// clean shutdown. It restores them when the same rank joins again.
//
// Keeper is the main type; router/app starts it. When a rank joins, its engine must first prove
// by a replay of events that it is the engine of the snapshot (Feeds.VerifyPosition). Then the
// rank's blocks are restored and its feed continues from the position. The blocks count as
// those of a feed that is syncing until the events since the snapshot have arrived, and are
// dropped if the engine no longer has those events. The package combines kvindex and kvevents,
// because the index has no knowledge of feeds. It never blocks a reader or a writer of the
// index, and it rejects an incomplete file by name and restores nothing from it.
package snapshot
