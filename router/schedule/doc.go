// Package schedule chooses a rank for a leg by cost and keeps the load that
// its choices make until they end.
//
// Scheduler.Choose weighs the prefill work left after overlap, the decode
// blocks in use and the load reserved by requests under way; ties are broken at
// random. A Reservation lives from choice to end. Every decision is kept with
// all its terms for the last N requests: see Explain. Called by disagg.
package schedule
