package kvtransfer

import (
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
)

// Tier is one tier as /health and the admin API show it.
type Tier struct {
	Tier   nixl.Tier      `json:"tier"`
	State  nixl.TierState `json:"state"`
	Reason string         `json:"reason"`
}

// Status describes the tiers as /health and the admin API show them.
type Status struct {
	Active nixl.Tier `json:"active"`
	Reason string    `json:"reason"` // why no better tier is active
	Tiers  []Tier    `json:"tiers"`  // best first; http is always up
}

// allTiers lists the tiers from best to worst. A tier that is not in the ladder is not
// configured.
var allTiers = [...]nixl.Tier{nixl.TierNIXL, nixl.TierUCX, nixl.TierZMQ}

// Status returns the state of every tier. For a nil Watcher every tier but http is off.
func (w *Watcher) Status() Status {
	var ladder nixl.Tiers
	if w != nil {
		ladder = w.ladder
	}
	var s Status
	s.Active, s.Reason = ladder.Active()
	for _, tier := range allTiers {
		line := Tier{tier, nixl.TierOff, "not started: transfers." + string(tier) + " is off, or it is auto and no model hands over by NIXL, or registration.listen is not set"}
		for _, m := range ladder {
			if m.Tier() == tier {
				line.State, line.Reason = m.Status()
			}
		}
		s.Tiers = append(s.Tiers, line)
	}
	s.Tiers = append(s.Tiers, Tier{nixl.TierHTTP, nixl.TierUp, "the engines' HTTP answers"})
	return s
}

// Up reports whether a tier is up and advertised to connectors; the metrics show it.
func (w *Watcher) Up(tier nixl.Tier) bool {
	if w != nil {
		for _, m := range w.ladder {
			if m.Tier() == tier {
				s, _ := m.Status()
				return s == nixl.TierUp && w.isAdvertised(tier)
			}
		}
	}
	return tier == nixl.TierHTTP
}

// isAdvertised reports whether the document for connectors contains the tier. It does from a
// moment after the tier is up, when its endpoint is stored.
func (w *Watcher) isAdvertised(tier nixl.Tier) bool {
	switch {
	case tier == nixl.TierNIXL && w.agent != nil:
		return w.agent.endpoint.Load() != nil
	case tier == nixl.TierUCX && w.ucx != nil:
		return w.ucx.endpoint.Load() != nil
	}
	return true
}

// TransferRates lists the measured transfer times between ranks, identified by their slots.
func (w *Watcher) TransferRates() []completion.PairTimes {
	if w == nil {
		return nil
	}
	return w.rates.List()
}
