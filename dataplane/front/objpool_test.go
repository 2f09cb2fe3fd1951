package front

import "sluice/dataplane/objpool"

// Every test of the package detects writes to a pooled object after its release.
func init() { objpool.EnableChecks() }
