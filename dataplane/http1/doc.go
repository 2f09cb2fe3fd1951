// Package http1 reads the syntax of HTTP/1.0 and HTTP/1.1 requests, strictly: request heads, request
// targets and chunked bodies. Where two servers could read a request differently it refuses it, so
// that a proxy in front and an engine behind see the same requests as this router.
//
// The package works on bytes and readers and knows no connections, limits of the configuration or
// endpoints. Its error messages are meant for the client.
package http1
