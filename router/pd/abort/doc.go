// Package abort has the rules for legs that end early: what is cancelled when a client disconnects, when,
// and how the KV that prefill leased is freed.
//
//   - rules.go is the one table, from a phase of the request and the class of its legs to what is
//     cancelled and how the blocks are reclaimed. RuleOf reads it for a family.
//   - Prefill, Decode and Deadline carry out the rules that take time. Probes tells Decode when an engine
//     has received a leg.
//   - KV is the state machine of the blocks behind a handle: every event of a leg, not only a disconnect,
//     leads to one state and one action on the lease.
//   - DownMonitor cancels a decode whose prefill engine goes down before its KV has arrived.
//
// The package cancels calls and releases leases. It chooses no rank and sends no leg: the release of an
// abandoned handle by a decode of one token is a leg of the request, so it is in package pd.
package abort
