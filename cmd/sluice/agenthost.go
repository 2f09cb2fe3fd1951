package main

import (
	"fmt"
	"io"

	"sluice/nixl"
)

// runAgentHost runs app.AgentHost, the process that transfers.isolate starts. Help does not
// list it: it needs a router's socket and is of no use to a person.
func runAgentHost(stderr io.Writer) int {
	if err := nixl.ServeHost(); err != nil {
		fmt.Fprintln(stderr, "sluice:", err)
		return 2
	}
	return 0
}
