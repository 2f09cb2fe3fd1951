// Package cost is the linear time model of a simulated rank: how long a step, a KV
// transfer and the admission of a request take.
//
// Its caller is package sim, which sleeps these times divided by Options.Speed.
package cost
