// Package apiformat converts answers between the formats of the engines' APIs: a completions answer to
// chat completions, a whole answer to a stream, and the continuation of a stream by another engine to
// the events that its client expects.
//
// A Conversion is the Rewriter of one stream, or converts one whole body. AppendEvents writes a whole
// answer as a stream. Packages transcript and router/pd call them.
package apiformat
