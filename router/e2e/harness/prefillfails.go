package harness

import (
	"time"

	"sluice/router/config"
)

// ShortPrefillTimeout limits a prefill leg to 1.5 s, keeps workers in the pools when they fail, and
// chooses engines in turn.
func ShortPrefillTimeout(c *config.Config) {
	c.Timeouts.Prefill = 1500 * time.Millisecond
	c.Health.UnhealthyThreshold = 1000 // keep failed workers in the pool
	c.Schedule.Policy = "round_robin"
}
