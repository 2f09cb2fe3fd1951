package obs

import (
	"fmt"
	"io"

	"sluice/router/apikey"
)

// ExposeKeys makes each scrape report the usage of every API key.
func (m *Metrics) ExposeKeys(ring *apikey.Keyring) {
	m.set.RegisterMetricsWriter(func(w io.Writer) {
		for _, k := range ring.Keys() {
			c := k.Counts()
			fmt.Fprintf(w, "%s %d\n", series("sluice_api_key_requests_total", "key", k.Name(), "outcome", "admitted"), c.Admitted)
			fmt.Fprintf(w, "%s %d\n", series("sluice_api_key_requests_total", "key", k.Name(), "outcome", "limited"), c.Limited)
			fmt.Fprintf(w, "%s %d\n", series("sluice_api_key_tokens_total", "key", k.Name()), c.Tokens)
		}
	})
}
