// Package dns finds workers by a DNS name: the addresses of the name (A and AAAA), or the targets
// of a service (SRV). It repeats a lookup when the TTL of the last answer has expired.
//
// Source is the main type; router/app runs it as a discovery.Source. It queries the servers itself
// because Go's resolver does not return TTLs. If a lookup fails, the workers of the last answer
// stay. The package never connects to a worker.
package dns
