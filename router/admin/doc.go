// Package admin is the operator's door to a running router: an HTTP server on a
// loopback address of its own, closed by a bearer token, with the state of the
// workers, the account of any recent decision, rates over time, a stream of
// what happens, drains, and the embedded console that shows them.
//
// Server is its one main type; Client and the runtime file are how the command
// line finds and asks one. It runs on net/http, off the way of requests, and
// changes nothing but through Fleet.Drain. The page itself carries no data and
// is the only thing served without the token.
package admin
