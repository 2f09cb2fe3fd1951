package harness

import "sluice/dataplane/objpool"

// Every test of the package finds who writes to a pooled object after its release.
func init() { objpool.EnableChecks() }
