// Package core is the core of a simulated engine: a Rank is one data-parallel rank with its goroutine,
// scheduler and pool of blocks, a Job is a request and a Seq one of its choices.
//
// A P/D family is a Family, which reads a Leg from each request that takes part in a hand-over. A rank
// calls the Leg when the request is queued, has blocks, has its last token and ends; the Leg asks the rank
// to wait for a transfer, to keep blocks under a lease and to end the request. Legs see nothing else of the
// scheduler.
package core
