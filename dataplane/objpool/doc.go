// Package objpool holds pools of objects that are used again, and checks in tests that
// nobody touches an object that is in a pool.
//
// A Pool is a sync.Pool of pointers to one type. While checking is on (under the race
// detector, or after Check), the memory of a released object that its next holder will
// write into is filled with a pattern: the free part of its slices, and blocks of bytes.
// When the object is lent again the pattern must still be there, or the program panics:
// somebody wrote to the object after releasing it. Whoever reads it after releasing it, or
// reads bytes that he has not written, gets the pattern in place of another request's
// bytes, which no test that compares contents accepts. Package membudget does the same
// with its buffers. Without checking, a Pool costs one branch more than a sync.Pool.
//
// The package imports nothing of ours.
package objpool
