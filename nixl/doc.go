// Package nixl makes the router a participant in NIXL and reports how KV transfers are
// observed.
//
// Its main type is Agent: memory registered for peers to write to, peers known by their
// metadata, transfers, notifications. A C thread owns the library (package
// native/nixl); Go talks to it through rings in mapped memory, so nothing on the path
// of a request enters C. CompletionBoard is the memory in which peers record the end of
// a transfer. OpenUCX provides the same over UCX's active messages alone. AgentTier
// keeps an agent alive for the router, and Fake is all of it in memory. docs/nixl.md
// describes the whole.
//
// Its callers are the router's assembly and router/kvtransfer. It never registers
// memory of the Go heap, never waits without a deadline, never loads a second NIXL or
// UCX, and never logs metadata, which contains the keys to memory.
package nixl
