// Package httpconn is the server's side of an HTTP/1.1 connection of a simulated engine:
// it reads requests with the case and order of their headers, writes without blocking,
// notices at once when the client disconnects, and can reset, as an engine that is killed
// does. It looks like uvicorn to a client.
//
// It is not net/http because a test must see a request exactly as it was sent, and
// because the scheduler writes a streamed token itself, with one system call.
package httpconn
