package app

// AgentHost is the hidden subcommand with which transfers.isolate starts this binary again:
// the new process runs nixl.ServeHost. A program that assembles a router with
// transfers.isolate must serve it.
const AgentHost = "agent-host"
