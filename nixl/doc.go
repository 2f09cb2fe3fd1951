// Package nixl makes the router a party in NIXL, and tells by what means KV
// transfers are observed.
//
// Its main type is Agent: memory registered for peers to write to, peers known by
// their metadata, transfers, notifications. A C thread owns the library (package
// native); Go speaks to it by rings in mapped memory, so that nothing on the path
// of a request enters C. Board is the memory in which peers tell a transfer's end,
// OpenUCX is the same over UCX's active messages alone. AgentTier keeps an agent alive for the router, Ladder says which tier is active,
// Fake is all of it in memory. docs/nixl.md has the whole picture.
//
// It is called by the router's wiring and by package completion's users. It never
// registers memory of the Go heap, never waits without a deadline, never loads a
// second NIXL or UCX, and logs no metadata, which holds the keys to memory.
package nixl
