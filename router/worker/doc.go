// Package worker names the engines behind the router and holds their live load.
//
// A Worker is one engine deployment with a URL, a role, models and one or more
// data-parallel ranks. The pair (worker, rank), ID, is the one identity used by
// the index, the scheduler, metrics, logs and response headers; a Slot is the
// same identity as a small dense number for the hot path. The fleet makes
// workers and gives out slots; everyone else reads. The package imports nothing
// of ours.
package worker
