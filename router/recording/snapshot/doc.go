// Package snapshot keeps the KV index over a restart of the router: what each
// rank holds goes to a file with the position of its event feed, at an interval
// and at a clean end, and comes back when the same rank joins again.
//
// Keeper is its main type. cmd starts it. When a rank joins, the engine has first
// to prove by replay that it is the one of the snapshot (Feeds.Prove); then the
// rank is restored, and its feed goes on from the position: what it holds counts as
// that of a feed that is syncing until the events since are there, and is dropped
// if they are not to be had. The package stands beside kvindex and kvevents
// because it joins the two; the index knows nothing of feeds. It never stops a
// reader or a writer of the index, and a file that is not whole is refused by
// name, never half believed.
package snapshot
