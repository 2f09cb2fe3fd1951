// Package eventloop drives streams on a few threads instead of a goroutine per connection. Each
// thread has a kernel poller of its own, reads what engines send and writes the result to clients.
//
// A Task is one stream: two descriptors, or one and a Sink, and a Handler that turns the bytes read
// into the bytes to write. Package relay attaches Tasks to Loops. The loop calls the Handler on its
// thread until the stream ends, then detaches the Task.
//
// A loop never closes a descriptor, never waits for a single stream, and allocates nothing for a
// read. The poller is epoll. On systems without it Start fails and streams stay on goroutines.
// docs/relay-cost.md has measurements, of io_uring too.
package eventloop
