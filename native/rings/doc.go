// Package rings is the C side of the two rings in shared memory through which Go
// drives a NIXL agent or a UCX worker: commands one way, events the other.
//
// rings.h declares the slots, operations and statuses and explains the memory order;
// driver.h is what the drivers in native/nixl and native/ucx build on. The Go side of
// the rings is in package sluice/nixl, which mirrors the structs and compares them
// with Layout in a test. CopyToC and TakeFromC move payloads that do not fit in a slot.
// The package starts no thread and loads no library.
package rings
