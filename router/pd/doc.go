// Package disagg runs a request: it finds the pool and the prompt's tokens,
// makes the plan (one leg, or prefill and decode), has each leg's rank chosen
// by cost, runs the legs, and decides what each failure means.
//
// Runner is its one type; it is the front's Handler. A Family (family.go) holds
// what is particular to one engine family's hand-over, as small pure functions
// in a file of its own: what is written on each leg (Leg), in which Order the
// legs of a Pair run, how the handle between them is read. Its Traits tell the
// runner what a failure means. The runner never reads a client's socket: front
// and relay move the bytes.
//
// The way through: ServeInference (runner.go) → resolvePool (pool.go) → resolvePrompt
// (prompt.go) → runWhole or runDisaggregated (attempt.go) → begin, then by the
// family's Order: prefill (prefill.go) → decode (decode.go); both at once
// (beside.go); or try decode, and prefill and decode when it declines.
package pd
