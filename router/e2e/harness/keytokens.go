package harness

import (
	"sluice/router/apikey"
	"sluice/router/config"
)

// TokenKey is a key of so many tokens a minute.
func TokenKey(limit int64) (header []string, mod func(*config.Config)) {
	key := apikey.New()
	return []string{"Authorization", "Bearer " + key}, WithKeys(config.APIKey{Name: "a", SHA256: apikey.HashOf(key).String(), TokensPerMinute: limit})
}
