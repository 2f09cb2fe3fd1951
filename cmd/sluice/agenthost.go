package main

import (
	"fmt"
	"io"

	"sluice/nixl"
)

// runAgentHost implements the app.AgentHost subcommand, which the router starts if
// transfers.isolate is set. The help does not list it, because it needs a socket that only the
// router passes.
func runAgentHost(stderr io.Writer) int {
	if err := nixl.ServeHost(); err != nil {
		fmt.Fprintln(stderr, "sluice:", err)
		return 2
	}
	return 0
}
