package config

import (
	"encoding/hex"
	"fmt"
	"strings"

	"sluice/router/worker"
)

func (c *Config) checkKeys(bad report) {
	names, hashes := map[string]int{}, map[string]int{}
	for i := range c.APIKeys {
		k, path := &c.APIKeys[i], fmt.Sprintf("api_keys[%d]", i)
		if k.Name == "" {
			bad(path+".name", "is missing; want a word for logs and metrics, such as team-a")
		} else if !worker.Printable(k.Name) {
			bad(path+".name", "%s is not a name for logs and metrics; want printable text without control, direction and zero-width characters", quoted(k.Name))
		} else if first, twice := names[k.Name]; twice {
			bad(path+".name", "%s is also the name of api_keys[%d]; want a unique name", quoted(k.Name), first)
		}
		names[k.Name] = i
		// The value may be the key itself, so it is not printed.
		if raw, err := hex.DecodeString(k.SHA256); err != nil || len(raw) != 32 {
			bad(path+".sha256", "want the 64 hexadecimal digits of the key's SHA-256, as `sluice key` prints them; got %d characters", len(k.SHA256))
			continue
		}
		hash := strings.ToLower(k.SHA256)
		if first, twice := hashes[hash]; twice {
			bad(path+".sha256", "is also the hash of api_keys[%d]; want each key once", first)
		}
		hashes[hash] = i
	}
	if strings.ContainsFunc(c.EngineKey, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		bad("engine_key", "contains a space or a character that is not allowed in a header line; want visible ASCII characters without spaces")
	}
}

// CanReloadKeys reports whether a running router can replace its API keys by those of other, which
// requires that both have keys. With the first key, or without the last, the router starts or stops
// authenticating clients, which needs a new process.
func (c *Config) CanReloadKeys(other *Config) bool {
	return len(c.APIKeys) > 0 && len(other.APIKeys) > 0
}
