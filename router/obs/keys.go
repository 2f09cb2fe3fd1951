package obs

import "sluice/router/apikey"

// maxKeys bounds the API keys with series of their own; the others are one series together.
const maxKeys = 500

// ExposeKeys makes each scrape report the usage of every API key: the first maxKeys one by one, in
// the order of the configuration, and the sum of the others as "other".
func (m *Metrics) ExposeKeys(ring *apikey.Keyring) {
	m.addCollector(func(p *page) {
		keys := ring.Keys()
		var rest apikey.Counts
		for i, k := range keys {
			c := k.Counts()
			if i >= maxKeys {
				rest.Admitted += c.Admitted
				rest.Limited += c.Limited
				rest.Tokens += c.Tokens
				continue
			}
			addKey(p, k.Name(), &c)
		}
		if len(keys) > maxKeys {
			addKey(p, otherValue, &rest)
		}
	})
}

func addKey(p *page, name string, c *apikey.Counts) {
	p.add("sluice_api_key_requests_total", labelPairs("key", name, "outcome", "admitted"), float64(c.Admitted))
	p.add("sluice_api_key_requests_total", labelPairs("key", name, "outcome", "limited"), float64(c.Limited))
	p.add("sluice_api_key_tokens_total", labelPairs("key", name), float64(c.Tokens))
}
