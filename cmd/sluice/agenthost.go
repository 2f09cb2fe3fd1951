package main

import (
	"fmt"
	"io"

	"sluice/nixl"
)

// agentHost is the command that transfers.isolate starts the binary again with. It is
// in no list: it needs a router's socket, and is of no use to a person.
const agentHost = "agent-host"

// isolateCommand is how a process for the agents is started: this binary, also when
// its file has been replaced meanwhile.
var isolateCommand = []string{"/proc/self/exe", agentHost}

func runAgentHost(stderr io.Writer) int {
	if err := nixl.ServeHost(); err != nil {
		fmt.Fprintln(stderr, "sluice:", err)
		return 2
	}
	return 0
}
