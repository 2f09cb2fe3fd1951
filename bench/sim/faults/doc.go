// Package faults selects the requests at which a simulated engine misbehaves, and how.
//
// A Fault names its kind and the requests it hits; a Set holds the armed faults of one
// engine. Its caller is package sim, which asks the Set about each request and acts as
// the matching Fault says. ParseFault reads the flag --fault of `sluice sim`.
package faults
