// Package load sends inference requests and measures what a user sees: time to first
// token, time between chunks and total time, as HDR histograms.
//
// Run is its entry point. It takes Options, drives a workload in a closed loop (a
// number of users, each with one request at a time) or an open loop (a rate, regardless
// of the server's speed), and returns a Report. In an open loop latencies are counted
// from when the request was due, not from when it could be sent, so that a stalled
// server cannot hide its own delays (coordinated omission).
//
// Its callers are the demo, the benchmarks and `sluice load`. It never imports the
// router.
package load
