// Package zmtp is a ZMQ PULL socket that listens, without libzmq: the wire is ZMTP 3
// (RFC 23 and 37) with the NULL mechanism.
//
// Its main type is Pull. nixl/notify and router/transfers keep one each, for LMCache's
// notifications and the connector's reports; the peers are libzmq's PUSH sockets. It
// exists because libzmq keeps a message of many parts whole before anyone sees it,
// without a bound, and because its messages pass two threads more. Here a message is one
// frame, frames and connections are bounded, and who may connect is decided at accept.
// It never connects anywhere, never sends but the handshake and answers to heartbeats,
// and knows nothing of what the messages say.
package zmtp
