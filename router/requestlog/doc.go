// Package requestlog collects what the access log and the tracer report about one request.
//
// package pd creates an Entry when a request begins, adds to it while the request runs, and
// finishes it once, when the client has its response or the stream has ended. The Log then passes
// the finished Entry to its sinks: accesslog writes a line of JSON, tracing exports spans. Without
// a sink there is no Entry, and every method works on a nil one.
package requestlog
