// Package membudget bounds what request and response bodies may take of the
// process's memory, and lends leveled buffers against that bound.
//
// Budget counts bytes and refuses, without waiting, what would pass its limit.
// Pool lends buffers in powers of two from 256 bytes to 16 KiB, in four steps to each doubling
// from there to 32 MiB, and larger ones by the
// page, and keeps a bounded amount of them in memory. Buffers of more than 16 KiB lie
// outside of Go's heap on Linux, so the collector neither waits for them nor lets other
// garbage grow in proportion to them. Lease is both at once: a buffer that is counted
// while it is lent. front and relay use them; of ours the package imports only reuse,
// which checks in tests that nobody uses a released buffer. It allocates nothing once warm.
package membudget
