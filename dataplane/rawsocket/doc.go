// Package rawsocket makes system calls on non-blocking sockets without informing Go's scheduler. To
// inform it costs as much as some of these calls. A thread that it believes to be in a system call
// also keeps the runtime's monitor awake, which then interrupts every 20 µs.
//
// The functions take a descriptor that the caller keeps open: the threads of package eventloop and
// callbacks of syscall.RawConn. They never wait and never allocate. The bytes moved by one call are
// bounded, because nothing can preempt it.
//
// Conn is a connection accepted by a Listener or adopted from another process. Its methods wait, as
// those of a net.Conn. Packages front and upstream use it.
package rawsocket

// MaxPiece is the most that one system call moves, in bytes: about 20 µs of copying. MaxVector is
// the limit of SendVector, which sends requests with long prompts: with smaller pieces the engine
// would wake up and compete for the processor after the first.
const (
	MaxPiece  = 64 << 10
	MaxVector = 256 << 10
)
