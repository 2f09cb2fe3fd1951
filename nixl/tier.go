package nixl

import "sluice/native"

// Tier is a means of learning that a KV transfer has ended, best first.
type Tier string

// The tiers.
const (
	TierNIXL Tier = "nixl" // notifications and writes to an agent of ours
	TierUCX  Tier = "ucx"  // active messages from our connector
	TierZMQ  Tier = "zmq"  // notifications of LMCache's kind
	TierHTTP Tier = "http" // the engines' HTTP answers alone
)

// Active is the tier in use and why it is not a better one.
func Active() (Tier, string) {
	if native.ABI() == 0 {
		return TierHTTP, "this binary was built without cgo, so it has no native tier"
	}
	return TierHTTP, "this version observes transfers through the engines' HTTP answers; it has no NIXL, UCX or ZMQ tier yet"
}
