// Package header reads the prefill workers of a request from its headers. A sidecar uses it when
// another router sits in front: that router chooses the prefill workers and names them in a
// header.
//
// Selector is the main type, a pd.WorkerSelector; the pd.Runner calls Select for each request.
// Selector checks every address against the networks and ports that the operator allows. It adds a
// worker that is named for the first time to the fleet as a transient worker, and removes it after
// IdleTimeout without a request that names it. The checked address is the address of the
// connection: Selector resolves a host name once, and the worker's URL contains the resolved
// address.
//
// Selector reads the first of these headers that the request has:
//
//	X-Sluice-Prefill        HOST:PORT[;rank=N][;bootstrap_port=PORT],… or none
//	X-Prefiller-Host-Port   HOST:PORT,…  (llm-d's picker)
//
// It also reads X-Data-Parallel-Host-Port: HOST:PORT, the address under which the other router
// knows one data-parallel rank of the sidecar's own engine.
//
// The package connects only to the name server. It never chooses among workers: the Runner tries
// them in the order of the header.
package header
