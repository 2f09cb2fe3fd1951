// Package jsonscan finds what the router must know in a request body, in one
// pass, without decoding it into maps, and splices fields in or out without
// re-encoding: 64-bit integers, key order, unknown fields and escapes reach the
// engine byte for byte.
//
// Doc is the result of one scan and is reused from request to request; Find
// does the same for one member of an engine's response, Iter walks what a scan
// has accepted. A scan checks the whole body (RFC 8259, UTF-8, a depth cap),
// because what two parsers read differently is how requests are smuggled. The
// package never copies the body and never allocates on the good path. Where there is
// AVX2 strings are passed over 32 bytes at a time (wide_amd64.go); -tags purego does
// without.
package jsonscan
