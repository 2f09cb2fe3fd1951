package pd

import "sluice/dataplane/objpool"

// The checks make every test of the package detect writes to a pooled object after its release.
func init() { objpool.EnableChecks() }
