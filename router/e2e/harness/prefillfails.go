package harness

import (
	"time"

	"sluice/router/config"
)

func ShortPrefillTimeout(c *config.Config) {
	c.Timeouts.Prefill = 1500 * time.Millisecond
	c.Health.UnhealthyThreshold = 1000 // keep failed workers in the pool
	c.Schedule.Policy = "round_robin"
}
