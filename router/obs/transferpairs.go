package obs

import (
	"fmt"
	"io"
)

// TransferPair is what was measured of KV transfers from one rank to another.
type TransferPair struct {
	From, To        string // worker/rank
	Transfers       int64
	BytesPerSecond  float64 // 0 unknown
	SecondsPerToken float64 // 0 unknown
}

// maxPairs bounds the series: prefill by decode ranks of a big fleet are more than
// a scrape should carry. The admin API lists all.
const maxPairs = 1024

// ExposePairs shows what pairs gives at each scrape, the first 1,024 of them.
func (m *Metrics) ExposePairs(pairs func() []TransferPair) {
	m.set.RegisterMetricsWriter(func(w io.Writer) {
		all := pairs()
		all = all[:min(len(all), maxPairs)]
		for _, of := range [...]struct {
			name  string
			value func(*TransferPair) float64
		}{
			{"sluice_kv_rank_transfers_total", func(p *TransferPair) float64 { return float64(p.Transfers) }},
			{"sluice_kv_rank_transfer_bytes_per_second", func(p *TransferPair) float64 { return p.BytesPerSecond }},
			{"sluice_kv_rank_transfer_token_seconds", func(p *TransferPair) float64 { return p.SecondsPerToken }},
		} {
			for i := range all {
				if v := of.value(&all[i]); v > 0 {
					fmt.Fprintf(w, "%s %g\n", series(of.name, "from", all[i].From, "to", all[i].To), v)
				}
			}
		}
	})
}
