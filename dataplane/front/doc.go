// Package front is the HTTP face of the router: a fasthttp server with the
// guard, the limits, the routes, the error shape and the drain. It admits a
// request, reads its body under the byte budget, scans it once and hands an
// Exchange to the Handler that cmd wired in; it knows no policy and no worker.
//
// A short answer leaves through fasthttp. A stream leaves fasthttp by a hijack
// that returns at once, is relayed by package relay, and its connection goes
// back to the server afterwards, keep-alive intact.
package front
