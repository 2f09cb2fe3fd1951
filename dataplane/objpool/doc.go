// Package objpool provides typed object pools that detect use after release in tests.
//
// A Pool is a sync.Pool of pointers to one type. Checking is on under the race detector and
// after EnableChecks. Put then fills the memory that the next holder will write (the free
// part of slices, arrays of bytes) with a pattern, and Get panics if the pattern has changed,
// because some code wrote to the object after its release. Code that reads released or
// unwritten memory reads the pattern instead of another request's bytes, so a test that
// compares contents fails. Package membudget checks its buffers in the same way. Without
// checking, a Pool costs one branch more than a sync.Pool.
//
// The package imports no other package of this module.
package objpool
