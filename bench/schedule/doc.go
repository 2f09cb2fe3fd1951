// Package schedule measures what the router thinks about one request: hashing of
// its tokens, lookup, choice and booking, over fleets of several sizes. It holds
// benchmarks only.
package schedule
