// Package discovery finds workers and keeps a membership in step with what it
// finds: what an operator listed, a file, workers that register themselves, DNS;
// Kubernetes is in a package below.
//
// Source is its main interface. A Runner, which cmd makes, runs sources over one
// fleet, each with a Set: a source says what there is, the Set finds what that
// changes. A source that cannot tell takes nobody out, and says in its State
// what is wrong. It tells of workers and of nothing else: whether one is healthy
// is the fleet's to find out.
package discovery
