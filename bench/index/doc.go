// Package index measures the KV index by a workload that stays the same over time
// and machines: see workload_test.go for how it is made, and `make bench-index` for
// the figures beside their targets. It holds benchmarks only.
package index
