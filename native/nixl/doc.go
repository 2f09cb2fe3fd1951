// Package nixl loads libnixl_capi and runs the thread that owns a NIXL agent.
//
// Load fills a table of function pointers; StartAgent starts the thread, which
// executes commands from a ring and reports completions, notifications and records on
// completion boards as events. Its caller is package sluice/nixl, which owns the
// rings. The package never links against NIXL and never calls it from a Go thread,
// except for loading.
package nixl

import "time"

// PollIntervals is how the thread of an agent waits.
type PollIntervals struct {
	Spin time.Duration // the thread stays awake this long after the last event while a transfer is in flight
	Busy time.Duration // then it polls this often while something is outstanding
	Idle time.Duration // longest sleep while nothing is outstanding
}
