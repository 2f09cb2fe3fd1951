// Package jsonscan finds what the router needs in a request body in one pass, without decoding it,
// and edits members without re-encoding: 64-bit integers, key order, unknown fields and escapes
// reach the engine byte for byte.
//
// Doc is the result of one scan and is reused from request to request. Find does the same for one
// member of an engine's response, and Iter walks values that a scan has accepted. Packages front,
// router/pd and router/tokenize call it. Cursor reads the events and answers of engines.
//
// A scan validates the whole body (RFC 8259, UTF-8, a depth limit), because bodies that two parsers
// read differently are how requests are smuggled. The package never copies the body and does not
// allocate on valid input. With AVX2 strings are scanned 32 bytes at a time (simd_amd64.go); -tags
// purego disables that.
package jsonscan
