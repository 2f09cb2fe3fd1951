// Package front is the router's HTTP server for clients: connections, limits, routes, error
// responses and the drain.
//
// Server is its main type. It admits a request, reads the body under the memory budget, scans
// it once, checks the members that engines act on (package fieldrules) and passes an Exchange
// to the Handler that the router's assembly provides. The package knows no scheduling policy
// and no worker.
//
// Requests take one of two paths. The fast path (fastpath.go) reads and answers nearly all of
// them; fasthttp serves the rest. Package relay moves a stream, from fasthttp after a hijack
// that returns at once, and the connection then returns to the fast path with keep-alive
// intact.
//
// The files are in two halves. Connections: accept, conn, connstate, drain, drainresponder, fastpath,
// headbudget, pendingheads, pendingresponse, pipelined, proxies, rawio, readahead,
// reservedfds, server, slowwrite, tls, yield. Requests: the others.
//
// There are three kinds of Exchange. A fastExchange and a fasthttpExchange embed httpExchange,
// which has all that the two paths share: admission, the body, errors, streams. An
// inProcessExchange has no HTTP client at all (inprocess.go).
package front
