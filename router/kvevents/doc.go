// Package kvevents reads engines' KV cache events and applies them to the
// index: one subscription per (worker, rank) over ZMQ, one decoder per engine
// family, replay on a gap and at start, and a restart of the engine drops what
// its old life held before anything new is applied.
//
// Feed is one rank's subscription; cmd starts and stops feeds as the fleet
// changes. Nothing here is on the path of a request.
package kvevents
