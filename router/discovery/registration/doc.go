// Package registration is the listener where workers register themselves, each
// with a lease that it renews; and the client that does so for an engine that
// knows nothing of it.
//
// Server is its main type, a discovery.Source that cmd runs. What a worker sends
// is an Announcement, version 1, documented in docs/discovery.md. The listener is
// for the network, unlike the admin's: it answers only callers of the networks it
// was given, with a token, a certificate or both, and takes no address of a
// worker that does not lie in these networks. It never makes a connection itself.
package registration
