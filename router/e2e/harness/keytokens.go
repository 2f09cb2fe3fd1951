package harness

import (
	"sluice/router/apikey"
	"sluice/router/config"
)

// TokenKey creates an API key with a limit of tokens per minute. It returns the header that
// presents the key and the change to the configuration that accepts it.
func TokenKey(limit int64) (header []string, mod func(*config.Config)) {
	key := apikey.New()
	return []string{"Authorization", "Bearer " + key}, WithKeys(config.APIKey{Name: "a", SHA256: apikey.HashOf(key).String(), TokensPerMinute: limit})
}
