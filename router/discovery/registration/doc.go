// Package registration is the listener on which workers register themselves, each with a lease
// that it renews. It also has the client that registers an engine which does not know this
// protocol.
//
// Server is the main type, a discovery.Source that router/app runs. A worker sends an
// Announcement, version 1, documented in docs/discovery.md. Unlike the admin listener, this
// listener serves the network: it accepts calls only from the configured networks, with a token, a
// client certificate or both, and rejects workers whose addresses lie outside those networks. The
// Server never opens a connection itself.
package registration
