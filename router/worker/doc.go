// Package worker names the engines behind the router and contains their live load.
//
// A Worker is one engine deployment with a URL, a role, models and one or more data-parallel ranks.
// The pair (worker, rank), ID, identifies a rank in the index, the scheduler, metrics, logs and
// response headers; a Slot is the same identity as a small dense number for the hot path. The fleet
// creates workers and assigns slots; all other packages read them. The package imports no other
// package of this module.
package worker
