// Package load sends inference traffic and measures what a user would see: time
// to first token, time between chunks, end to end, as HDR histograms.
//
// Run is its one entry: it takes Options, drives a Workload in a closed loop (a
// number of users, each with one request at a time) or an open loop (a rate,
// whatever the server does), and returns a Report. In an open loop every
// latency is counted from when the request was due, not from when it could be
// sent, so that a stalled server cannot hide its own delays (coordinated
// omission). It knows nothing of the router; the demo, the benchmarks and
// `sluice load` call it.
package load
