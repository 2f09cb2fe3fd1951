// Package schedule measures the router's decision about one request: hashing of its
// tokens, lookup, choice and reservation, for fleets of several sizes. It has
// benchmarks only.
package schedule
