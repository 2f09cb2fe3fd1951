// Package kvevents reads engines' KV cache events and applies them to the index: one ZMQ
// subscription per (worker, rank), one decoder per engine family, and a replay at the start and
// after a gap. When an engine restarts, its previous blocks are dropped before a new event is
// applied.
//
// Feeds is the main type: the router starts and stops one feed per rank as the fleet changes, with
// the endpoints that the fleet has discovered. Decoder turns one message into Events. Loads applies
// the engines' load messages. The package is not on the path of a request, no input from an engine
// makes it panic, and its memory is bounded in bytes (inbox, zmtp.StreamOptions).
package kvevents
