package engineapi

import "sluice/dataplane/objpool"

// Every test of the package fails if code writes to a pooled object after its release.
func init() { objpool.EnableChecks() }
