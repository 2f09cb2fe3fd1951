// Package sock makes the system calls on a non-blocking socket that never wait without
// a word to Go's scheduler. Telling it costs as much as some of them, and a thread that
// it believes to be in a system call is what keeps the runtime's monitor awake, which
// then interrupts every 20 µs.
//
// Its functions are called with a descriptor that somebody else keeps open: a loop's
// threads do, and callbacks of syscall.RawConn. They never wait and never allocate;
// what they move in one system call is bounded, because nothing can preempt them.
//
// Conn is a connection made of them, of those that Listener accepts; its own methods wait.
package rawsocket

// MaxPiece is the most that one system call moves, in bytes: some 20 µs of copying.
// MaxVector is that of SendVector, which sends requests with long prompts: each further
// piece finds the engine awake and competing for a processor.
const (
	MaxPiece  = 64 << 10
	MaxVector = 256 << 10
)
