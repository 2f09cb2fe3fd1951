package obs

import (
	"fmt"
	"io"
)

// TransferPair has the measurements of KV transfers from one rank to another.
type TransferPair struct {
	From, To        string // rank ids, as worker/rank
	Transfers       int64
	BytesPerSecond  float64 // 0: unknown
	SecondsPerToken float64 // 0: unknown
}

// maxPairs bounds the number of pairs: in a large fleet, prefill ranks times decode ranks are too
// many series for a scrape. The admin API lists all pairs.
const maxPairs = 1024

// ExposePairs makes each scrape report the first maxPairs of the pairs that the function returns.
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
