// Package admin is the operator's HTTP API to a running router, on a separate loopback address and
// protected by a bearer token. It serves the state of the workers, the record of any recent
// decision, rates over time, an event stream, drains, reload and restart, and the embedded console
// that displays them.
//
// Server is the main type; router/app creates it. Client calls the API, and the runtime file tells
// the command line the address and the token of a running router. The server uses net/http,
// because it is not on the request path. It changes the router only through drain, reload and
// restart. The console's files contain no data and are the only routes that need no token.
package admin
