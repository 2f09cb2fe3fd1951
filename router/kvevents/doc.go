// Package kvevents reads engines' KV cache events and applies them to the
// index: one subscription per (worker, rank) over ZMQ, one decoder per engine
// family, replay on a gap and at start, and a restart of the engine drops what
// its old life held before anything new is applied.
//
// Feeds is its main type: cmd starts and stops one feed per rank as the fleet
// changes, with endpoints that the fleet has found (fleet.Events).
// Decoder turns one message into Events. Nothing here is on the path of a
// request, and nothing an engine sends can make it panic. What it takes to memory
// is bounded by bytes (inbox, zmtp.StreamOptions).
package kvevents
