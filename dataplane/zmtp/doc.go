// Package zmtp implements ZMQ sockets without libzmq: ZMTP 3 (RFC 23 and 37) with the NULL
// mechanism.
//
// Pull is a listening PULL socket. router/kvtransfer/notify and router/kvtransfer use one each, for
// LMCache's notifications and the connector's reports. The peers are libzmq's PUSH sockets. A
// message is one frame.
//
// Stream is one connection of a SUB or DEALER socket, and a Poller watches many of them.
// router/kvevents uses one or two for each rank, for engines' KV events and their replay. The peers
// are libzmq's PUB and ROUTER sockets. A Stream is read without waiting and has one descriptor.
//
// The package exists because libzmq buffers a message of many parts without a bound before
// delivering it, passes messages through two more threads, and needs at least two descriptors per
// socket. Here frames, parts, messages and connections are bounded. The package does not interpret
// messages.
package zmtp
