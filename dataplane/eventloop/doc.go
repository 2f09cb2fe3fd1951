// Package loop drives streams outside of the goroutine-per-connection world: a few
// threads, each with a poller of the kernel's, read what engines send and write what
// becomes of it to clients.
//
// A Task is one stream: two descriptors, or one and a Sink, and a Handler, which looks at
// the bytes and says what goes on. relay attaches Tasks; the loop calls the Handler on its thread
// until the stream ends one way or the other, then gives the Task back. It never
// closes a descriptor, never waits for one stream, and allocates nothing for a read.
//
// The poller is epoll; where there is none, Start fails and streams stay on
// goroutines. docs/relay-cost.md has the figures, of io_uring too.
package eventloop
