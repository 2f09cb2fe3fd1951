// Package relay passes an engine's response to a client as its bytes arrive. The engine's own chunk
// framing goes through and nothing is re-encoded. One scan of the events finds the first token,
// usage, finish reason, errors and the end of the stream.
//
// Start and Stream are called by package front (and by router/engineapi) after the response head
// has been written. The router sees only the Result. A stream runs on a goroutine, or on an event
// loop where Options.Loops is set.
//
// Reads may split an event at any byte. The memory of a stream is bounded, and an event costs no
// allocation. The package never opens connections and never logs.
package relay
