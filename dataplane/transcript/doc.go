// Package transcript records what a client has received of a generated stream, so that another
// engine can continue it. A Transcript is the sse.Rewriter of such a stream: it keeps the token ids
// or the text that the client has, hides ids from a client that did not ask for them, holds back
// the error event of an engine that fails, and makes the events of the next engine continue those
// of the first.
//
// The package reads and writes events and does no I/O. Package relay moves the bytes and decides when
// a stream changes its engine; package router/pd/migration decides which streams may.
//
// EventTemplate and NativeShape recognise an event that differs from the one before only in its
// content, without a walk of its JSON. Package relay's scan of a stream uses them too.
package transcript
