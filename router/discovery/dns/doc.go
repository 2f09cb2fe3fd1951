// Package dns finds workers by name: the addresses of a name (A and AAAA), or
// the targets of a service (SRV), looked up again when their TTL has passed.
//
// Source is its main type; cmd runs it under package discovery. It asks the
// servers itself because Go's resolver does not tell a TTL. A lookup that fails
// leaves the workers of the last answer in.
package dns
