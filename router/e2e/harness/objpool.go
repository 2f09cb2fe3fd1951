package harness

import "sluice/dataplane/objpool"

// Enable the checks that detect writes to a pooled object after its release in every test.
func init() { objpool.EnableChecks() }
