package harness

import (
	"sluice/router/config"
)

// WithKeys returns a change to the configuration that requires one of the given API keys.
func WithKeys(keys ...config.APIKey) func(*config.Config) {
	return func(c *config.Config) { c.APIKeys = keys }
}

// KeyBody is the body of a text completion for 4 output tokens, not streamed.
const KeyBody = `{"model":"sim","prompt":"hello","max_tokens":4}`
