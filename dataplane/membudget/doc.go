// Package membudget bounds the memory of request and response bodies and provides pooled
// buffers that count against that bound.
//
// Budget counts bytes. It refuses what would exceed its limit and never waits. Pool provides
// buffers in size classes: powers of two from 256 bytes to 16 KiB, four classes for each
// doubling up to 32 MiB, and multiples of a page above. A Pool retains a bounded amount of
// free buffers. On Linux, buffers over 16 KiB are mapped outside Go's heap, so that they
// neither delay a garbage collection nor let the heap grow in proportion to them. A Lease is
// a buffer together with its share of a Budget.
//
// Packages front, relay and compression use it. It allocates nothing once warm. Of this
// module it imports objpool alone, which detects use after release in tests.
package membudget
