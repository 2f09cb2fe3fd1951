// Package named finds prefill workers in the headers of requests, for a sidecar
// whose requests arrive through somebody else's router: that one has chosen, and
// says so.
//
// Namer is its one type; disagg.Runner calls it for each request. It checks every
// address against the networks and ports that the operator allows, takes a worker
// met for the first time into the fleet as a guest, and dismisses it when it has
// not been named for a while. What was checked is what is connected to: a host
// name is resolved here, once, and the guest's URL holds the address.
//
// Headers, the first that is there counts:
//
//	X-Sluice-Prefill        HOST:PORT[;rank=N][;bootstrap_port=PORT],… or none
//	X-Prefiller-Host-Port   HOST:PORT,…  (llm-d's picker)
//
// and beside them X-Data-Parallel-Host-Port HOST:PORT, the address by which the
// other router knows one data-parallel rank of the own engine.
//
// It never connects anywhere itself but to the name server, and never chooses:
// workers are tried in the order they were named in.
package header
