// Package coding takes content codings (RFC 9110, 8.4: gzip, zstd) off request
// bodies, within a bound and under a byte budget, and puts them on answers. It is
// called by package front; it reads no header line but the two values it is given.
package compression
