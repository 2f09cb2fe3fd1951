// Package membudget bounds what request and response bodies may take of the
// process's memory, and lends leveled buffers against that bound.
//
// Budget counts bytes and refuses, without waiting, what would pass its limit.
// Pool lends buffers in powers of two from 256 bytes to 32 MiB and keeps a bounded
// amount of them. Lease is both at once: a buffer that is counted while it is
// lent. front and relay use them; the package imports nothing of ours and
// allocates nothing once warm.
package membudget
