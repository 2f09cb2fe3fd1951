// Package discovery finds workers and keeps a membership in step with what it
// finds: what an operator named, a file, a registry, the network.
//
// Source is its one interface; Static is the only source there is so far. Serve
// runs sources; the fleet is their Sink. A source tells of workers and of
// nothing else: whether one is healthy is the fleet's to find out.
package discovery
