package nixl

import (
	"fmt"
	"strings"

	"sluice/native/dl"
)

// Tier is a means of learning that a KV transfer has ended, best first.
type Tier string

// The tiers.
const (
	TierNIXL Tier = "nixl" // notifications and writes to an agent of ours
	TierUCX  Tier = "ucx"  // active messages from our connector
	TierZMQ  Tier = "zmq"  // notifications of LMCache's kind
	TierHTTP Tier = "http" // the engines' HTTP answers alone
)

// TierState is whether a tier can be used.
type TierState string

// The states of a tier.
const (
	TierOff      TierState = "off"      // cannot work here; the reason says what is missing
	TierStarting TierState = "starting" // not known yet
	TierUp       TierState = "up"
	TierDown     TierState = "down" // worked, or should; tried again by itself
)

// TierService is one tier at work. Status answers at once, from any goroutine.
type TierService interface {
	Tier() Tier
	Status() (state TierState, reason string)
	Close() error
}

// Tiers is the tiers of a router, best first. HTTP is always below them.
type Tiers []TierService

// Active is the best tier that is up, and why it is not a better one.
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
	reasons = append(reasons, "transfers are observed through the engines' HTTP answers")
	return TierHTTP, strings.Join(reasons, "; ")
}

// Active is the tier in use where no ladder was set up, and why it is not a better
// one.
func Active() (Tier, string) {
	if dl.ABI() == 0 {
		return TierHTTP, "this binary was built without cgo, so it has no native tier"
	}
	return TierHTTP, "what a router uses is said by its /health: it depends on transfers, register and the models' families"
}
