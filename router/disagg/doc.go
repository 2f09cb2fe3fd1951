// Package disagg runs a request: it finds the pool and the prompt's tokens,
// makes the plan (one leg, or prefill then decode), has each leg's rank chosen
// by cost, runs the legs, and decides what each failure means.
//
// Runner is its one type; it is the front's Handler. A Family holds what is
// particular to one engine family's hand-over: what is rewritten on each leg
// and how the handle between them is read. The runner never reads a client's
// socket: front and relay move the bytes.
//
// The way through: ServeInference (runner.go) → findPool (pool.go) → findPrompt
// (prompt.go) → runWhole or runDisaggregated (attempt.go) → prefill
// (prefill.go) → decode (decode.go).
package disagg
