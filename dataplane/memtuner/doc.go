// Package lean keeps the process's memory near what is in use.
//
// Keep is its one entry: it looks at Go's collector once a second, has a large heap
// grow by less before it is collected again, and uses quiet moments to collect and to
// give what is free back to the system. A program calls it once, at its start; it
// changes nothing else, and keeps out of the way of traffic: while there is enough of that
// for Go to collect every few seconds, it only looks, and what it does takes a hundredth of
// the time at the most. Memory outside of Go's heap is its owner's: Options.Idle says when to
// let go of what nobody uses. It imports nothing of ours.
package memtuner
