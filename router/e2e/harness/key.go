package harness

import (
	"sluice/router/config"
)

func WithKeys(keys ...config.APIKey) func(*config.Config) {
	return func(c *config.Config) { c.APIKeys = keys }
}

const KeyBody = `{"model":"sim","prompt":"hello","max_tokens":4}`
