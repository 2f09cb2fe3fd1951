// Package wire is the framed socket of the router's engine interface: many
// requests on one connection, each with a stream of items back, over unix
// sockets and TCP. The format is written down in docs/wire.md.
//
// Server is its main type: it takes connections on gnet event loops (TLS ones
// on goroutines, because gnet has none), reads frames, and gives each request
// to its Handler as a Stream. Client is the other end, for tests and for the
// typed client in router/engineapi/client.
//
// It knows frames, credits and connections. It never looks into a request or
// an item: those are package routed's, which is its caller.
package wire
