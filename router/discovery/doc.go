// Package discovery finds workers and keeps the fleet's members in step with them. This package
// has the sources for the workers of the configuration and of a file. The subpackages
// registration, dns and kube have the others; subpackage header serves the sidecar, whose workers
// come from request headers.
//
// Source is the main interface. A Runner, which router/app creates, runs the sources on one fleet,
// each with its own Set. A source reports all the workers that it finds, and its Set applies the
// difference to the fleet. A source that fails removes no worker; it reports the failure in its
// State. A source never reports health: the fleet probes its workers itself.
package discovery
