// Package upstream keeps the connections to engines: dialling, TLS, pooling,
// writing a request, reading the response head and, where asked, the body.
//
// Endpoint is one engine server; Call is one leg under way and can be cut from
// any goroutine. The package knows no policy: whom to call and whether to try
// again are the router's, which learns from an Error's Phase how far a call
// had come. Responses are parsed strictly: duplicate Content-Length,
// Content-Length with Transfer-Encoding, an endless head or chunk extension,
// and 1xx floods are errors, never a guess.
//
// A small leg on a kept-alive connection is two system calls, one write and one
// read, and no allocation (conn.exchange says how).
package upstream
