// Package wire is the framed socket of the router's engine API: many requests on one connection,
// each with a stream of items back, over unix sockets and TCP. docs/wire.md specifies the format.
//
// Server is its main type. It accepts connections on gnet event loops (TLS connections on
// goroutines, because gnet has no TLS), reads frames, and passes each request to its Handler as a
// Stream. Client is the other end, for tests and for the typed client in router/engineapi/client.
//
// The package knows frames, credit and connections. It never interprets a request or an item; its
// caller, router/engineapi, does.
package wire
