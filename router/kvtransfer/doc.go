// Package transfers is how the router learns what became of KV transfers.
//
// Its main type is Watch: it keeps the tiers alive (an agent of ours in NIXL, a ZMQ
// PULL socket; below them the engines' HTTP answers), tells connectors where they
// are (Document), and gives the runner a Wait for each hand-over. cmd makes it,
// router/pd opens waits, registration serves the document, obs and admin show
// tiers and pairs. A tier that fails falls to the next: the waits that are open then
// simply hear nothing, and the engines' answers decide as they do without a tier.
// It never sends a request and never decides where one goes.
package kvtransfer
