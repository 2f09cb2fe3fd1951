// Package eventpub publishes the KV events of a rank over ZMQ as engines do: numbered
// batches on a PUB socket, and the last ones again on request at a ROUTER socket.
package eventpub
