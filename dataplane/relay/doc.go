// Package relay passes an engine's response stream to a client as the bytes
// arrive: the engine's own chunk framing goes through, nothing is re-encoded,
// and one scan finds the first token, usage, finish reason, errors and the end.
//
// Stream is called by front after the response head; the router sees only the
// Result. The scan's state is bounded and lives with the stream, reads may
// split an event at any byte.
package relay
