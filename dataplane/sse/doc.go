// Package sse knows the format of server-sent event streams: where an event begins and ends, what its
// data are, and what an error event and the last event look like in each API's protocol. It also
// frames events as chunks of an HTTP/1.1 body.
//
// Framer and Splitter find events in input that is cut anywhere. A Rewriter replaces events. Packages
// relay, redact, apiformat, transcript, front and router/engineapi call it. An event costs no
// allocation.
package sse
