package app

// AgentHost is the name of the hidden subcommand that the router uses to start this binary
// a second time if transfers.isolate is set. The second process runs nixl.ServeHost.
// A program that assembles a router with transfers.isolate must implement the subcommand.
const AgentHost = "agent-host"
