package obs

import (
	"fmt"
	"io"
	"maps"
	"slices"

	dto "github.com/prometheus/client_model/go"
)

// LegacySeries describes the former form of a metric: its name, its label names and its label
// values. Fields that did not change are empty. /metrics writes the former series, in addition to
// the present ones, only with metrics.legacy_names.
type LegacySeries struct {
	Name    string            // present name of the metric, in the Catalog
	Old     string            // former name of the metric; "" if unchanged
	Label   string            // present name of a label whose name or values changed; "" for none
	OldName string            // former name of Label; "" if unchanged
	Values  map[string]string // former values of Label, by present value
}

var (
	formerCauses   = map[string]string{"cancelled": "cut", "engine_protocol_error": "engine_broke", "engine_incomplete": "engine_ended"}
	formerReasons  = map[string]string{"missing_api_key": "no_key", "unknown_api_key": "unknown_key", "upstream_invalid_response": "upstream_garbage", "decompression_busy": "decoders_busy"}
	formerOutcomes = union(formerCauses, formerReasons)
)

// union returns a map with the entries of a and b.
func union(a, b map[string]string) map[string]string {
	m := maps.Clone(a)
	maps.Copy(m, b)
	return m
}

// LegacyNames are the former series that metrics.legacy_names shows.
var LegacyNames = []LegacySeries{
	{Name: "sluice_responses_incomplete_total", Old: "sluice_answers_cut_total"},
	{Name: "sluice_requests_refused_total", Label: "reason", Values: formerReasons},
	{Name: "sluice_legs_total", Label: "outcome", Values: formerOutcomes},
	{Name: "sluice_rank_legs_total", Label: "outcome", Values: formerOutcomes},
	{Name: "sluice_fallbacks_total", Label: "kind", Values: map[string]string{"decode_only": "plain_decode", "peer_info_unavailable": "no_fact", "peer_info_stale": "stale_fact", "notifications_missing": "silent_prefill", "prefill_unavailable": "prefill_resting", "multiple_choices": "many_choices"}},
	{Name: "sluice_migrations_total", Label: "outcome", Values: map[string]string{"multiple_choices": "many_choices", "incomplete_character": "half_character", "incomplete_start": "no_beginning"}},
	{Name: "sluice_plans_total", Label: "reason", Values: map[string]string{"not_considered": "not_asked"}},
	{Name: "sluice_streams_total", Label: "cause", Values: formerCauses},
	{Name: "sluice_fd_limit_events_total", Old: "sluice_descriptor_shortage_total", Label: "event", OldName: "what", Values: map[string]string{"rejected": "turned_away"}},
	{Name: "sluice_rank_cached_blocks", Old: "sluice_rank_held_blocks"},
	{Name: "sluice_engine_restarts_total", Label: "evidence", OldName: "sign", Values: map[string]string{"counters_reset": "counters_fell", "connection_refused": "refused"}},
	{Name: "sluice_kv_feed_total", Label: "kind", Values: map[string]string{"malformed": "garbage", "duplicate": "repeated", "unknown_locality": "unlocated"}},
	{Name: "sluice_kv_uncredited_blocks_total", Old: "sluice_kv_elsewhere_blocks_total"},
	{Name: "sluice_kv_handles_leased", Old: "sluice_kv_handles_pinned"},
	{Name: "sluice_kv_notification_breakers_open", Old: "sluice_kv_silent_ranks"},
	{Name: "sluice_kv_notifications_total", Label: "outcome", Values: map[string]string{"not_a_notification": "foreign"}},
	{Name: "sluice_kv_notifications_unmatched", Old: "sluice_kv_notifications_unclaimed"},
	{Name: "sluice_zmq_refused_total", Label: "reason", Values: map[string]string{"at_capacity": "crowded", "protocol_error": "broken"}},
	{Name: "sluice_kv_transfers_pending", Old: "sluice_kv_transfers_watched"},
	{Name: "sluice_kv_transfers_total", Label: "outcome", Values: map[string]string{"unknown": "untold"}},
	{Name: "sluice_kv_reports_total", Label: "report", Values: map[string]string{"not_a_report": "unread", "unauthenticated": "forged", "at_capacity": "crowded"}},
	{Name: "sluice_kv_side_channel_total", Label: "outcome", OldName: "what"},
	{Name: "sluice_kv_rank_transfers_total", Old: "sluice_kv_pair_transfers_total"},
	{Name: "sluice_kv_rank_transfer_bytes_per_second", Old: "sluice_kv_pair_bytes_per_second"},
	{Name: "sluice_kv_rank_transfer_token_seconds", Old: "sluice_kv_pair_token_seconds"},
	{Name: "sluice_load_messages_total", Label: "kind", Values: map[string]string{"malformed": "garbage", "wrong_rank": "foreign"}},
	{Name: "sluice_tokenizer_backed_off_total", Old: "sluice_tokenizer_rested_total"},
	{Name: "sluice_api_key_requests_total", Old: "sluice_key_requests_total"},
	{Name: "sluice_api_key_tokens_total", Old: "sluice_key_tokens_total"},
	{Name: "sluice_engine_api_certificate_expiry_timestamp_seconds", Old: "sluice_routed_certificate_expiry_timestamp_seconds"},
	{Name: "sluice_engine_api_connections", Old: "sluice_routed_connections"},
	{Name: "sluice_engine_api_streams", Old: "sluice_routed_streams"},
	{Name: "sluice_engine_api_stalled_total", Old: "sluice_routed_stalled_total"},
	{Name: "sluice_engine_api_request_bytes", Old: "sluice_routed_request_bytes"},
	{Name: "sluice_engine_api_requests_total", Old: "sluice_routed_requests_total"},
	{Name: "sluice_engine_api_refused_total", Old: "sluice_routed_refused_total"},
	{Name: "sluice_recording_entries_total", Old: "sluice_record_entries_total"},
	{Name: "sluice_recording_dropped_total", Old: "sluice_record_dropped_total"},
	{Name: "sluice_recording_bytes_total", Old: "sluice_record_bytes_total"},
	{Name: "sluice_recording_active", Old: "sluice_record_active"},
}

var legacyByName = func() map[string]*LegacySeries {
	m := make(map[string]*LegacySeries, len(LegacyNames))
	for i := range LegacyNames {
		m[LegacyNames[i].Name] = &LegacyNames[i]
	}
	return m
}()

// addLegacy appends the former series to the families: those that keep the name of their metric to
// its family, those of renamed metrics as families of their own at the end.
func addLegacy(all []*dto.MetricFamily) []*dto.MetricFamily {
	renamed := map[string]*dto.MetricFamily{}
	for _, f := range all {
		l := legacyByName[f.GetName()]
		if l == nil {
			continue
		}
		former := f
		if l.Old != "" {
			help := "Deprecated: see " + l.Name + "."
			former = &dto.MetricFamily{Name: &l.Old, Help: &help, Type: f.Type}
			renamed[l.Old] = former
		}
		for _, s := range f.Metric {
			labels, changed := l.labels(s.Label)
			if changed || l.Old != "" {
				former.Metric = append(former.Metric, &dto.Metric{Label: labels, Gauge: s.Gauge, Counter: s.Counter, Histogram: s.Histogram})
			}
		}
	}
	for i := range LegacyNames {
		if f := renamed[LegacyNames[i].Old]; f != nil {
			all = append(all, f)
		}
	}
	return all
}

// labels returns labels with the former name and value of Label, and whether they differ.
func (l *LegacySeries) labels(labels []*dto.LabelPair) (former []*dto.LabelPair, changed bool) {
	at := slices.IndexFunc(labels, func(p *dto.LabelPair) bool { return l.Label != "" && p.GetName() == l.Label })
	if at < 0 {
		return labels, false
	}
	name, value := l.Label, labels[at].GetValue()
	if l.OldName != "" {
		name, changed = l.OldName, true
	}
	if old, renamed := l.Values[value]; renamed {
		value, changed = old, true
	}
	if !changed {
		return labels, false
	}
	former = slices.Clone(labels)
	former[at] = &dto.LabelPair{Name: &name, Value: &value}
	return former, true
}

// documentLegacy writes the table of former series as Markdown.
func documentLegacy(w io.Writer) {
	fmt.Fprint(w, "| old | new |\n| --- | --- |\n")
	for i := range LegacyNames {
		l := &LegacyNames[i]
		name := l.Old
		if name == "" {
			name = l.Name
		}
		was := l.OldName
		if was == "" {
			was = l.Label
		}
		switch {
		case l.Label == "":
			fmt.Fprintf(w, "| `%s` | `%s` |\n", name, l.Name)
		case l.OldName != "" || l.Old != "":
			fmt.Fprintf(w, "| `%s{%s}` | `%s{%s}` |\n", name, was, l.Name, l.Label)
		}
		values := make([]string, 0, len(l.Values))
		for value := range l.Values {
			values = append(values, value)
		}
		slices.Sort(values)
		for _, value := range values {
			fmt.Fprintf(w, "| `%s{%s=\"%s\"}` | `%s{%s=\"%s\"}` |\n", name, was, l.Values[value], l.Name, l.Label, value)
		}
	}
}
