// Package upstream manages the connections to engines: dialling, TLS, pooling, writing a request,
// reading the response head and, if wanted, the body.
//
// Endpoint is one engine server. Call is one running leg and can be cancelled from any goroutine.
// Group is the calls to one engine rank. Packages front, relay and the router call this package. It
// has no policy: the router decides which engine to call and whether to retry, and learns from an
// Error's Phase how far a call had come.
//
// Responses are parsed strictly: a duplicate Content-Length, Content-Length with Transfer-Encoding,
// an endless head or chunk extension, and floods of 1xx responses are errors, never guesses.
//
// A small leg on a kept-alive connection is two system calls, one write and one read, and no
// allocation (see exchange).
package upstream
