package obs

import dto "github.com/prometheus/client_model/go"

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
	m.addCollector(func(p *page) {
		all := pairs()
		all = all[:min(len(all), maxPairs)]
		labels := make([][]*dto.LabelPair, len(all))
		for i := range all {
			labels[i] = labelPairs("from", all[i].From, "to", all[i].To)
		}
		for _, of := range [...]struct {
			name  string
			value func(*TransferPair) float64
		}{
			{"sluice_kv_rank_transfers_total", func(t *TransferPair) float64 { return float64(t.Transfers) }},
			{"sluice_kv_rank_transfer_bytes_per_second", func(t *TransferPair) float64 { return t.BytesPerSecond }},
			{"sluice_kv_rank_transfer_token_seconds", func(t *TransferPair) float64 { return t.SecondsPerToken }},
		} {
			p.addAll(of.name, labels, func(i int) (float64, bool) { v := of.value(&all[i]); return v, v > 0 })
		}
	})
}
