package obs

import (
	"bytes"
	"fmt"
	"io"
	"strings"
)

// Family is one metric name with its type, labels and help text.
type Family struct {
	Name   string
	Type   string // counter, gauge, histogram
	Labels string // comma-separated
	Help   string
}

// Catalog has every metric name that /metrics may show, except the go_ and process_ ones, in the
// order of docs/metrics.md. Document writes that page from it.
var Catalog = []Family{
	{"sluice_requests_accepted_total", "counter", "", "Inference requests admitted: read whole, well formed, of a known route."},
	{"sluice_requests_refused_total", "counter", "endpoint, reason", "Requests the router itself answered with an error; reason as in X-Sluice-Reason: too_many_connections where limits.max_conns, max_conns_per_ip or the descriptors are used up, engine_connections where limits.engine_conns is, decoders_busy where too many compressed bodies are decoded at once."},
	{"sluice_responses_total", "counter", "endpoint, code", "Responses ended, by HTTP status, whether or not the client took them to the end; 499: the client left before its answer was written."},
	{"sluice_request_duration_seconds", "histogram", "endpoint", "From the request's head to the end of the response, whether or not the client took it to the end."},
	{"sluice_time_to_first_token_seconds", "histogram", "endpoint", "From the request's head to its first token, of streamed responses."},
	{"sluice_client_connections", "gauge", "", "Open client connections."},
	{"sluice_fd_limit_events_total", "counter", "event", "Want of file descriptors: accept_failed (waited out), rejected (new connections answered 503), idle_closed (kept-alive connections closed to make room)."},
	{"sluice_panics_total", "counter", "", "Panics of handlers, recovered; each is logged with its stack. Above 0 is a bug."},

	{"sluice_legs_total", "counter", "leg, outcome", "Engine calls ended; leg is prefill, decode or whole, outcome ok, the engine's status class or a reason."},
	{"sluice_legs_in_flight", "gauge", "leg", "Engine calls under way."},
	{"sluice_leg_duration_seconds", "histogram", "leg", "From an engine call's start to its end."},
	{"sluice_leg_retries_total", "counter", "leg", "Legs that were run again on another rank."},
	{"sluice_fallbacks_total", "counter", "kind", "Requests whose prefill/decode plan was not run as made, by why (incomplete_handle, plain_decode, lease_expired, prefill_failed, …)."},
	{"sluice_models_without_handover", "gauge", "", "Models whose last requests (10 or more in a row) were all decoded without the hand-over that pd configures, because no prefill worker is healthy or what prefill answers cannot be handed over; /readyz, /health and the log say why."},
	{"sluice_migrations_total", "counter", "outcome", "Streams whose engine failed under way: done (they go on from another), failed (no other took them), limit, or why they could not; and those that left a worker that drains: drained (docs/migration.md)."},
	{"sluice_plans_total", "counter", "plan, reason", "Choices between prefill on another rank (plan remote) and on the decode rank (local), by why (few_uncached, faster, uncached, unknown_prompt; not_asked where only the ranks were chosen together); and prefill-only requests (prefill_only), by what asked for it (header, max_tokens)."},

	{"sluice_responses_incomplete_total", "counter", "cause", "Whole answers, which are no streams, that their clients did not take to the end, by why (client_stalled: nothing within timeouts.write, client_gone, drained)."},

	{"sluice_streams_total", "counter", "cause", "Relayed answers ended, by why; these are streams, and JSON that is over 1 MiB or of no told length (completed, client_gone, client_stalled, engine_closed, engine_stalled, cut, drained, deadline, engine_broke: its framing, engine_ended: well framed, before the answer did, engine_error: well, with an error event of the engine's; memory_budget: part of an event could not be held, `limits.memory_budget` was spent; completed: the answer was whole, whatever became of the engine's connection behind it)."},
	{"sluice_stream_events_total", "counter", "", "Events relayed."},
	{"sluice_stream_bytes_total", "counter", "", "Body bytes relayed, framing included."},
	{"sluice_stream_unscanned_events_total", "counter", "", "Events too large for the scan even without their long strings and inner parts: relayed, but not looked into for usage."},
	{"sluice_stream_engine_errors_total", "counter", "", "Streams in which the engine sent an error event, whatever they ended with."},

	{"sluice_output_tokens_total", "counter", "", "Tokens generated, as engines reported in the usage of streams."},
	{"sluice_cache_prompt_tokens_total", "counter", "", "Prompt tokens of requests with a predicted overlap, zero included."},
	{"sluice_cache_predicted_tokens_total", "counter", "", "Of those, tokens predicted to be cached on the chosen rank."},
	{"sluice_cache_compared_prompt_tokens_total", "counter", "", "Prompt tokens of requests for which the engine reported its cached tokens."},
	{"sluice_cache_compared_predicted_tokens_total", "counter", "", "Of those, tokens predicted to be cached."},
	{"sluice_cache_reported_tokens_total", "counter", "", "Of those, tokens the engine reported as cached: over the prompt's, the actual hit rate."},
	{"sluice_cache_prediction_error_tokens_total", "counter", "", "Sum of the differences between predicted and reported, without sign."},

	{"sluice_worker_state", "gauge", "worker, role, state", "1 for the state the worker is in."},
	{"sluice_engine_frozen_total", "counter", "state", "Ranks found frozen, by state: process (it accepts connections and answers nothing), core (its API server answers, and nothing advances), host (no connection can be made)."},
	{"sluice_engine_frozen_calls_total", "counter", "state", "Requests to engines that were ended because the engine was found frozen; their streams migrate, others are run again where that is possible."},
	{"sluice_engine_frozen_ranks", "gauge", "state", "Ranks that are frozen now. They are in no pool until they show a sign of life."},
	{"sluice_engine_restarts_total", "counter", "evidence", "New engine processes found behind a worker's address, by the evidence: start_time, metrics_created, counters_reset, connection_refused, event_sources, engine_id (another in a hand-over). What the old one held was dropped. Those that KV events show first are in kind restarts of sluice_kv_feed_total."},
	{"sluice_rank_legs_total", "counter", "worker, rank, leg, outcome", "Engine calls ended, by rank."},
	{"sluice_rank_requests", "gauge", "worker, rank", "Requests placed on the rank by this router and not ended."},
	{"sluice_rank_prefill_tokens", "gauge", "worker, rank", "Prompt tokens reserved on the rank and not yet computed."},
	{"sluice_rank_decode_blocks", "gauge", "worker, rank", "KV blocks reserved on the rank by requests being decoded."},
	{"sluice_rank_engine_running", "gauge", "worker, rank", "Requests running, as the engine says; absent until it has."},
	{"sluice_rank_engine_waiting", "gauge", "worker, rank", "Requests waiting, as the engine says; absent until it has."},
	{"sluice_rank_engine_queued_tokens", "gauge", "worker, rank", "Prompt tokens that the engine's waiting requests have still to compute, as its load messages say; absent where none say it."},
	{"sluice_rank_kv_usage_ratio", "gauge", "worker, rank", "Share of KV blocks in use, as the engine says."},
	{"sluice_rank_breaker_state", "gauge", "worker, rank", "0 closed; 1 half open: one request at a time; 2 open: out of the choice."},
	{"sluice_rank_prefill_token_seconds", "gauge", "worker, rank", "Time that a prompt token takes to compute, as learned from the worker's legs; absent until it has been."},
	{"sluice_rank_transfer_token_seconds", "gauge", "worker, rank", "Time that the KV of a prompt token takes to be pulled, as learned; absent until it has been."},
	{"sluice_rank_decode_block_seconds", "gauge", "worker, rank", "Time that a resident KV block adds to a request's decode, as learned; absent until it has been."},
	{"sluice_rank_cached_blocks", "gauge", "worker, rank", "KV blocks the index holds for the rank."},
	{"sluice_rank_feed_live", "gauge", "worker, rank", "1 while the rank's KV events are contiguous: its overlap can be trusted. 0 also of an engine without replay that has said nothing yet."},
	{"sluice_kv_feed_total", "counter", "worker, rank, kind", "What came over the rank's KV event feed (batches, stored, removed, cleared, duplicate, unknown_removed, orphans, ignored) and what went wrong (gaps, tail_checks, resyncs, replays, replayed_batches, replay_failures, restarts, resets, malformed, oversize, wrong_rank), and blocks that lie, or may lie, at another machine (remote, unknown_locality)."},
	{"sluice_kv_uncredited_blocks_total", "counter", "medium, locality", "KV blocks that engines stored and that are credited to no worker: medium FS, OBJ, STORAGE, EXTERNAL, other; locality remote (the engine says so) or unspecified (storage that may be another machine's)."},

	{"sluice_kv_index_blocks", "gauge", "", "Entries (rank, tier, block) of the KV index."},
	{"sluice_kv_index_bytes", "gauge", "", "Memory the KV index takes."},
	{"sluice_kv_index_evicted_total", "counter", "", "Entries dropped for want of room (index.max_bytes), the coldest ends of prompts first: what ranks hold beyond it is not known."},
	{"sluice_kv_snapshots_total", "counter", "outcome", "Snapshots of the KV index (index.snapshot): written, failed."},
	{"sluice_kv_snapshot_timestamp_seconds", "gauge", "", "When the last snapshot was written, in seconds since 1970; 0: not since the start."},
	{"sluice_kv_snapshot_ranks_restored_total", "counter", "", "Ranks whose blocks came back from the snapshot; those whose engine did not prove itself were dropped again (kind restarts or resets of sluice_kv_feed_total)."},
	{"sluice_kv_approx_blocks", "gauge", "", "Entries of the approximate index (text mode, engines without events)."},
	{"sluice_kv_approx_bytes", "gauge", "", "Memory the approximate index takes."},
	{"sluice_kv_approx_evicted_total", "counter", "", "Entries dropped for want of room (a quarter of index.max_bytes), those longest not seen first."},
	{"sluice_relay_threads", "gauge", "", "Event loops that drive streams; 0: each stream has a goroutine (relay.driver, or a kernel that refuses)."},
	{"sluice_relay_loop_streams", "gauge", "", "Streams over HTTP that event loops drive now; those over TLS and encoded ones are on goroutines, those of the framed engine socket on loops of its own."},
	{"sluice_pool_waiters", "gauge", "", "Requests waiting for a pool to have a healthy worker, against limits.pool_waiters."},
	{"sluice_engine_api_certificate_expiry_timestamp_seconds", "gauge", "", "When the certificate of the framed engine socket ends, in seconds since 1970; absent without TLS."},
	{"sluice_engine_api_connections", "gauge", "", "Connections of the framed engine socket."},
	{"sluice_engine_api_streams", "gauge", "", "Requests of the framed engine socket that are under way."},
	{"sluice_engine_api_stalled_total", "counter", "", "Streams of the framed engine socket that were ended because their caller took nothing."},
	{"sluice_engine_api_request_bytes", "gauge", "", "Memory that requests of the framed engine socket hold, against limits.memory_budget."},
	{"sluice_engine_api_requests_total", "counter", "", "Preprocessed requests, of the socket and of POST /v1/routed/generate."},
	{"sluice_engine_api_refused_total", "counter", "", "Those of them refused for what they held, before anything was sent."},
	{"sluice_retries_denied_total", "counter", "", "Retries not made because their pool's budget was spent (fleet.retry_budget_ratio)."},
	{"sluice_load_messages_total", "counter", "kind", "Engines' load messages: applied, malformed (could not be read), wrong_rank (of a rank that its worker does not have here)."},
	{"sluice_kv_handles_pinned", "gauge", "", "Prefill hand-overs whose blocks a prefill worker keeps for a decode not yet begun."},
	{"sluice_kv_orphan_ranks", "gauge", "", "Ranks whose KV events place no block because none of their parents is known: 32 stores in a row or more. No prompt is found there."},
	{"sluice_kv_notification_breakers_open", "gauge", "", "Prefill ranks that get no hand-overs because they do not tell that KV has been written (pd.completion_timeout)."},
	{"sluice_kv_notifications_total", "counter", "outcome", "LMCache's notifications: received; of these early (nobody waited yet), expired (nobody ever did), dropped (no room); beside them foreign and malformed messages."},
	{"sluice_kv_notifications_unmatched", "gauge", "", "Requests notified of that nobody waits for."},
	{"sluice_zmq_connections", "gauge", "socket", "Connections to the router's ZMQ sockets: lmcache (notifications), reports (of connectors)."},
	{"sluice_zmq_refused_total", "counter", "socket, reason", "Connections to them that were closed: network (from outside of the networks allowed), at_capacity (too many), protocol_error (no ZMTP 3 PUSH socket, a frame too long, or too slow)."},
	{"sluice_kv_tier_up", "gauge", "tier", "1 while the router can be told of KV transfers by this tier: nixl, ucx, zmq; http, the engines' answers, always."},
	{"sluice_kv_transfers_pending", "gauge", "", "Hand-overs that the router waits to be told of."},
	{"sluice_kv_transfers_total", "counter", "outcome", "Watched hand-overs that ended: done, failed, expired (prefill let go of the blocks unread), stalled (transfers.stall_timeout), untold."},
	{"sluice_kv_reports_total", "counter", "report", "Reports of connectors by event (recv, sent, expired) and status (ok, failed); unknown: nobody waited for it, malformed, refused: a record or a nonce that fitted no ticket, unread: a message that is none, forged: a message over UCX without the secret that connectors are given, crowded: a hand-over that heard nothing, for too many were watched."},
	{"sluice_kv_side_channel_total", "counter", "outcome", "Requests whose lease was renewed or whose blocks were released on a prefill engine (transfers.side_channel); failed: messages that could not be sent."},
	{"sluice_kv_rank_transfers_total", "counter", "from, to", "KV transfers told of between two ranks; of the pair's series the first 1,024 pairs are shown."},
	{"sluice_kv_rank_transfer_bytes_per_second", "gauge", "from, to", "Bandwidth of those of 64 KiB and more, moving average."},
	{"sluice_kv_rank_transfer_token_seconds", "gauge", "from, to", "Time that one prompt token's KV took, moving average, gone when two minutes brought no transfer; from the fourth on the scheduler's transfer rate for the pair."},
	{"sluice_prompts_total", "counter", "source", "Prompts by where their tokens came from (request, cache, engine, text: none found, routed over text; none: neither)."},
	{"sluice_tokenizer_coalesced_total", "counter", "", "Prompts that waited for another request's lookup of the same."},
	{"sluice_tokenizer_backed_off_total", "counter", "", "Prompts for which the engine was not asked because it had just failed."},
	{"sluice_tokenizer_refused_total", "counter", "", "Lookups that an engine answered with a 4xx."},
	{"sluice_tokenizer_failed_total", "counter", "", "Lookups that failed otherwise, time-outs included."},
	{"sluice_tokenizer_timeouts_total", "counter", "", "Lookups that took longer than tokens.timeout."},
	{"sluice_tokenizer_cache_entries", "gauge", "", "Prompts in the token cache."},
	{"sluice_tokenizer_cache_bytes", "gauge", "", "Memory of the token cache."},
	{"sluice_api_key_requests_total", "counter", "key, outcome", "Requests by the API key they showed: admitted, limited (a limit of the key was reached; a request that the limit of tokens refuses for its prompt counts as both)."},
	{"sluice_api_key_tokens_total", "counter", "key", "Tokens, of prompts and outputs, spent by an API key's holder."},
	{"sluice_certificate_expiry_timestamp_seconds", "gauge", "", "When the certificate that clients are shown ends, in seconds since 1970; absent without TLS."},
	{"sluice_memory_budget_used_bytes", "gauge", "", "Request bodies held now, against limits.memory_budget."},
	{"sluice_recording_entries_total", "counter", "", "Entries written to recordings (recording.dir, sluice record)."},
	{"sluice_recording_dropped_total", "counter", "", "Entries not recorded because the queue was full; the recording has their number too."},
	{"sluice_recording_bytes_total", "counter", "", "Compressed bytes given to recordings."},
	{"sluice_recording_active", "gauge", "", "1 while a recording is under way (recording.dir, sluice record); where recording.dir is set, 0 says that it broke off, as on a full disk, and the log why."},
	{"sluice_build_info", "gauge", "version", "1, with the version in its label."},
}

var families = func() map[string]*Family {
	m := make(map[string]*Family, len(Catalog))
	for i := range Catalog {
		m[Catalog[i].Name] = &Catalog[i]
	}
	return m
}()

// describe copies lines, which are grouped by family, and writes the HELP and TYPE lines of a
// family before its first line.
func describe(w io.Writer, lines []byte, legacyNames bool) {
	var last *Family
	var legacy legacyWriter
	defer legacy.finish(w)
	for len(lines) > 0 {
		end := bytes.IndexByte(lines, '\n') + 1
		if end == 0 {
			end = len(lines)
		}
		line := lines[:end]
		lines = lines[end:]
		f := familyOf(line)
		if f != last {
			legacy.flush(w)
		}
		if f != nil && f != last {
			fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n", f.Name, f.Help, f.Name, f.Type)
			last = f
		}
		if legacyNames && f != nil {
			legacy.add(f, line)
		}
		w.Write(line)
	}
}

// familyOf returns the family of a line of the exposition, or nil if it is not in the Catalog.
func familyOf(line []byte) *Family {
	if i := bytes.IndexAny(line, "{ "); i >= 0 {
		line = line[:i]
	}
	if f := families[string(line)]; f != nil {
		return f
	}
	for _, part := range [...]string{"_bucket", "_sum", "_count"} {
		if name, ok := bytes.CutSuffix(line, []byte(part)); ok {
			if f := families[string(name)]; f != nil && f.Type == "histogram" {
				return f
			}
		}
	}
	return nil
}

// Document writes docs/metrics.md from the Catalog.
func Document(w io.Writer) {
	fmt.Fprint(w, `# Metrics

This page lists the router's metrics, in Prometheus' text format.

`+"```"+`
curl http://127.0.0.1:8080/metrics
`+"```"+`

The front and the admin listener serve them at `+"`/metrics`"+`.
Durations are in seconds, sizes in bytes.
A rank is one (worker, data-parallel rank).
Its series appear when its worker first becomes ready, and are gone from the next scrape when the worker leaves.
Series without a value yet are absent.
The usual `+"`go_…` and `process_…`"+` series are served too.
`+"`metrics.legacy_names: true`"+` also shows the former series of renamed metrics and label values ([upgrading.md](upgrading.md#metrics)).

`+"`/metrics`"+` needs no API key.
It shows the names of workers and of API keys, never a key.
Let only the monitoring network reach it: bind `+"`listen`"+` to an internal address, or block the path in the proxy in front.

The catalog in `+"`router/obs/catalog.go`"+` is the source of this page: `+"`go test ./router/obs -run TestDocument -rewrite`"+`.

| name | type | labels | meaning |
| --- | --- | --- | --- |
`)
	for _, f := range Catalog {
		labels := f.Labels
		if labels != "" {
			labels = "`" + strings.ReplaceAll(labels, ", ", "`, `") + "`"
		}
		fmt.Fprintf(w, "| `%s` | %s | %s | %s |\n", f.Name, f.Type, labels, f.Help)
	}
}
