// Package front is the HTTP face of the router: the guard, the
// limits, the routes, the error shape and the drain. It admits a request, reads its
// body under the byte budget, scans it once and hands an Exchange to the Handler that
// cmd wired in; it knows no policy and no worker.
//
// A connection's requests take one of two lanes (lane.go): those that are plain, nearly
// all, are read and answered here; the rest by fasthttp. A stream leaves its lane, from
// fasthttp's by a hijack that returns at once, is relayed by package relay, and its
// connection goes back to the plain lane afterwards, keep-alive intact.
package front
