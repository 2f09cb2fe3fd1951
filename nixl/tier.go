package nixl

import (
	"fmt"
	"strings"

	"sluice/native/dl"
)

// Tier is a means of detecting that a KV transfer has ended, best first.
type Tier string

// The tiers.
const (
	TierNIXL Tier = "nixl" // notifications and writes to an agent of this process
	TierUCX  Tier = "ucx"  // active messages from the connector
	TierZMQ  Tier = "zmq"  // notifications of LMCache
	TierHTTP Tier = "http" // the engines' HTTP responses alone
)

// TierState says whether a tier can be used.
type TierState string

// The states of a tier.
const (
	TierOff      TierState = "off"      // cannot work here; the reason names what is missing
	TierStarting TierState = "starting" // not known yet
	TierUp       TierState = "up"
	TierDown     TierState = "down" // failed; retried automatically
)

// TierService is one tier. Status returns at once, from any goroutine.
type TierService interface {
	Tier() Tier
	Status() (state TierState, reason string)
	Close() error
}

// Tiers lists the tiers of a router, best first. HTTP is always below them.
type Tiers []TierService

// Active returns the best tier that is up, and why it is not a better one.
func (l Tiers) Active() (Tier, string) {
	var reasons []string
	for _, m := range l {
		state, reason := m.Status()
		if state == TierUp {
			reasons = append(reasons, fmt.Sprintf("%s: %s", m.Tier(), reason))
			return m.Tier(), strings.Join(reasons, "; ")
		}
		reasons = append(reasons, fmt.Sprintf("%s is %s: %s", m.Tier(), state, reason))
	}
	reasons = append(reasons, "transfers are observed through the engines' HTTP responses")
	return TierHTTP, strings.Join(reasons, "; ")
}

// Active returns the tier in use if there are no tiers, and why it is not a better one.
func Active() (Tier, string) {
	if dl.ABI() == 0 {
		return TierHTTP, "this binary was built without cgo, so it has no native tier"
	}
	return TierHTTP, "the /health endpoint of a router reports the tier in use, which depends on transfers, register and the models' families"
}
