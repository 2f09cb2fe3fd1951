// Package memtuner keeps the process's memory near what is in use.
//
// Run is its only entry point. It samples Go's garbage collector once a second, lets a large
// heap grow by less before the next collection, and collects and returns free memory to the
// system in quiet moments. It does not disturb traffic: while Go itself collects every few
// seconds Run only samples, and its own collections take at most one percent of the time. It
// does not manage memory outside Go's heap, but calls Options.Idle, whose owner can release
// what is unused. A program calls Run once, at start.
//
// The package imports no other package of this module.
package memtuner
