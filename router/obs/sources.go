package obs

import (
	"sluice/router/kvindex"
	"sluice/router/tokenize"
)

// ExposeIndex makes each scrape report the size of the KV index and of the approximate index;
// approx may be nil.
func (m *Metrics) ExposeIndex(ix kvindex.Index, approx *kvindex.Approx) {
	m.GaugeFunc(func() float64 { return float64(ix.Len()) }, "sluice_kv_index_blocks")
	m.GaugeFunc(func() float64 { return float64(ix.Bytes()) }, "sluice_kv_index_bytes")
	if e, can := ix.(kvindex.Evictor); can {
		m.GaugeFunc(func() float64 { return float64(e.Evicted()) }, "sluice_kv_index_evicted_total")
	}
	if approx != nil {
		m.GaugeFunc(func() float64 { return float64(approx.Len()) }, "sluice_kv_approx_blocks")
		m.GaugeFunc(func() float64 { return float64(approx.Bytes()) }, "sluice_kv_approx_bytes")
		m.GaugeFunc(func() float64 { return float64(approx.Evicted()) }, "sluice_kv_approx_evicted_total")
	}
}

// ExposeTokenizer makes each scrape report the sources of prompts' tokens and the state of the
// token cache.
func (m *Metrics) ExposeTokenizer(t *tokenize.Tokenizer) {
	for source, read := range map[string]func(*tokenize.Stats) uint64{
		"request": func(s *tokenize.Stats) uint64 { return s.FromRequest },
		"cache":   func(s *tokenize.Stats) uint64 { return s.FromCache },
		"engine":  func(s *tokenize.Stats) uint64 { return s.FromEngine },
		"native":  func(s *tokenize.Stats) uint64 { return s.FromNative },
		"text":    func(s *tokenize.Stats) uint64 { return s.FromText },
		"none":    func(s *tokenize.Stats) uint64 { return s.None },
	} {
		m.GaugeFunc(func() float64 { s := t.Stats(); return float64(read(&s)) }, "sluice_prompts_total", "source", source)
	}
	for name, read := range map[string]func(*tokenize.Stats) float64{
		"sluice_tokenizer_coalesced_total":            func(s *tokenize.Stats) float64 { return float64(s.Coalesced) },
		"sluice_tokenizer_backed_off_total":           func(s *tokenize.Stats) float64 { return float64(s.BackedOff) },
		"sluice_tokenizer_refused_total":              func(s *tokenize.Stats) float64 { return float64(s.Refused) },
		"sluice_tokenizer_failed_total":               func(s *tokenize.Stats) float64 { return float64(s.Failed) },
		"sluice_tokenizer_timeouts_total":             func(s *tokenize.Stats) float64 { return float64(s.Timeouts) },
		"sluice_tokenizer_native_unmodelled_total":    func(s *tokenize.Stats) float64 { return float64(s.Unmodelled) },
		"sluice_tokenizer_native_failed_total":        func(s *tokenize.Stats) float64 { return float64(s.NativeFailed) },
		"sluice_tokenizer_native_cached_tokens_total": func(s *tokenize.Stats) float64 { return float64(s.NativeCached) },
		"sluice_tokenizer_native_encoded_bytes_total": func(s *tokenize.Stats) float64 { return float64(s.NativeEncoded) },
		"sluice_tokenizer_checks_total":               func(s *tokenize.Stats) float64 { return float64(s.Checks) },
		"sluice_tokenizer_checks_failed_total":        func(s *tokenize.Stats) float64 { return float64(s.ChecksFailed) },
		"sluice_tokenizer_mismatches_total":           func(s *tokenize.Stats) float64 { return float64(s.Mismatches) },
		"sluice_tokenizer_count_differences_total":    func(s *tokenize.Stats) float64 { return float64(s.Suspicions) },
		"sluice_tokenizer_cache_entries":              func(s *tokenize.Stats) float64 { return float64(s.CacheEntries) },
		"sluice_tokenizer_cache_bytes":                func(s *tokenize.Stats) float64 { return float64(s.CacheBytes) },
	} {
		m.GaugeFunc(func() float64 { s := t.Stats(); return read(&s) }, name)
	}
	for _, state := range []string{"used", "mismatch", "failed"} {
		m.GaugeFunc(func() float64 { return float64(nativeModels(t, state)) }, "sluice_tokenizer_native_models", "state", state)
	}
}

// nativeModels counts the models of a NativeState.Use.
func nativeModels(t *tokenize.Tokenizer, state string) (n int) {
	for _, s := range t.NativeStates() {
		if s.Use() == state {
			n++
		}
	}
	return n
}
