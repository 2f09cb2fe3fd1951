// Package zmtp speaks ZMQ without libzmq: the wire is ZMTP 3 (RFC 23 and 37) with the
// NULL mechanism.
//
// Pull is a PULL socket that listens. router/kvtransfer/notify and router/kvtransfer keep one each, for
// LMCache's notifications and the connector's reports; the peers are libzmq's PUSH
// sockets. A message of it is one frame.
//
// Stream is one connection of a SUB or DEALER socket, and a Poller watches many of them.
// router/kvevents keeps one or two for each rank, for engines' KV events and replays; the
// peers are libzmq's PUB and ROUTER sockets. A Stream is read without waiting and has one
// descriptor.
//
// The package exists because libzmq keeps a message of many parts whole before anyone
// sees it, without a bound, because its messages pass two threads more, and because a
// socket of it takes at least two descriptors. Here frames, parts, messages and connections
// are bounded. It knows nothing of what the messages say.
package zmtp
