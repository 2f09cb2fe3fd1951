// Package sidechannel sends prefill engines of plain vLLM the NIXL notifications that their
// decode engines would send. It renews the leases of requests that are between their two legs,
// and releases the blocks of requests that were abandoned.
//
// Its main type is Manager. router/pd passes each handle to Acquire and ends the Lease when the
// handle's fate is known. router/app creates the Manager when transfers.side_channel is set.
// The Manager fetches an engine's agent metadata from its side channel, the ZMQ socket that
// decode engines use too, and loads it into the router's own agent. It never releases a handle
// that a decode engine may still read, never contacts a vLLM release whose messages are unknown
// (outside 0.22 to 0.33), and never logs metadata.
package sidechannel
