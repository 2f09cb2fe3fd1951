// Package app assembles a router from a configuration: it connects the policy of
// router/ with the data plane of dataplane/, and is the only package that does.
//
// Router is its main type. New binds the listeners and starts to probe the workers,
// Run serves until its context ends and then drains, Reload applies an edited
// configuration file, Restart replaces this process with a new one (hot restart), and Close
// stops everything that New started. cmd/sluice calls it for serve, sidecar and demo;
// the system tests in router/e2e call it through router/e2e/harness.
//
// The package decides nothing about a request (router/pd and router/schedule do) and
// never reads command line flags or writes to standard output.
package app
