package tokenize

import "sluice/dataplane/reuse"

// Every test of the package finds who writes to a pooled object after its release.
func init() { reuse.Check() }
