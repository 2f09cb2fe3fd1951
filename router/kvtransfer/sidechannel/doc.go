// Package sidechannel does for prefill engines of plain vLLM what their decode
// engines do by NIXL notification: it renews the leases of requests that the router
// holds between the legs, and releases the blocks of those that were abandoned.
//
// Its main type is Keeper; router/pd gives it each handle (Hold) and says what
// became of it, cmd makes it where transfers.side_channel asks for it. An engine's
// agent metadata comes from its side channel, the ZMQ socket that decode engines ask
// too, and is loaded into the router's own agent. It never releases a handle whose
// decode may still be at work, it speaks to no release of vLLM whose messages are
// not known (0.22 to 0.33), and it never logs metadata.
package sidechannel
