// Package ucx loads libucp and runs UCP workers that send and receive active messages.
//
// A Worker sits behind the same rings as a NIXL agent, so package sluice/nixl, its
// caller, uses both alike. It has no thread: its owner calls Step and waits for FD in
// between, so an idle worker costs nothing. It transfers no memory and registers none.
package ucx

// Next is what the caller of Worker.Step does next; it mirrors enum sluice_ucx_next.
type Next int

// What the caller of Worker.Step does next.
const (
	Stopped   Next = iota // nothing: the worker is freed
	More                  // step again
	Wait                  // wait for the worker's descriptor, or for a command
	RetrySoon             // step again after a short sleep
)
