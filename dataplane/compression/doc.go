// Package compression decodes compressed request bodies and encodes responses with the
// content codings gzip and zstd (RFC 9110, 8.4).
//
// Algorithm is the main type. Decode bounds the decoded length, counts all memory in a
// membudget.Budget and takes turns with other bodies (see scheduler), so that compressed
// bodies cannot occupy every core. Append encodes a whole response, and Stream one that is
// sent event by event.
//
// Package front calls it with the values of Content-Encoding and Accept-Encoding; it reads no
// other header.
package compression
