package obs

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
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

// line returns the former form of a line of the exposition, or nil if the line is unchanged.
func (l *LegacySeries) line(line []byte) []byte {
	text := string(line)
	rest := strings.TrimPrefix(text, l.Name)
	if l.Label != "" {
		rest = l.labels(rest)
	}
	name := l.Name
	if l.Old != "" {
		name = l.Old
	}
	if name+rest == text {
		return nil
	}
	return []byte(name + rest)
}

// labels replaces the name and value of Label by the former ones in {name="value",...} and returns
// the result, with the rest of the line.
func (l *LegacySeries) labels(text string) string {
	at := 0
	for at < len(text) && (text[at] == '{' || text[at] == ',') {
		name, rest, _ := strings.Cut(text[at+1:], `="`)
		start := at + 1
		at = start + len(name) + len(`="`)
		end := 0
		for end < len(rest) && rest[end] != '"' {
			if rest[end] == '\\' {
				end++
			}
			end++
		}
		if name != l.Label {
			at += end + 1
			continue
		}
		value := rest[:min(end, len(rest))]
		if old, renamed := l.Values[value]; renamed {
			value = old
		}
		if l.OldName != "" {
			name = l.OldName
		}
		return text[:start] + name + `="` + value + text[min(at+end, len(text)):]
	}
	return text
}

// legacyWriter collects the former series while describe writes the present ones.
type legacyWriter struct {
	same    bytes.Buffer             // former series whose metric name did not change, of the current family
	renamed map[string]*bytes.Buffer // former series of renamed metrics, by former name
}

func (g *legacyWriter) add(f *Family, line []byte) {
	l := legacyByName[f.Name]
	if l == nil {
		return
	}
	old := l.line(line)
	switch {
	case old == nil:
	case l.Old == "":
		g.same.Write(old)
	default:
		if g.renamed[l.Old] == nil {
			if g.renamed == nil {
				g.renamed = map[string]*bytes.Buffer{}
			}
			g.renamed[l.Old] = new(bytes.Buffer)
		}
		g.renamed[l.Old].Write(old)
	}
}

// flush writes the former series that keep the name of the current family, at the end of that
// family: the exposition format requires that the lines of a family are contiguous.
func (g *legacyWriter) flush(w io.Writer) {
	_, _ = g.same.WriteTo(w)
}

// finish writes the former series of renamed metrics, in the order of LegacyNames.
func (g *legacyWriter) finish(w io.Writer) {
	g.flush(w)
	for i := range LegacyNames {
		l := &LegacyNames[i]
		if lines := g.renamed[l.Old]; l.Old != "" && lines != nil {
			fmt.Fprintf(w, "# HELP %s Deprecated: see %s.\n# TYPE %s %s\n", l.Old, l.Name, l.Old, families[l.Name].Type)
			_, _ = lines.WriteTo(w)
		}
	}
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
