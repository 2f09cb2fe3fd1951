package obs

import (
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
	{"sluice_requests_accepted_total", "counter", "", "Inference requests admitted: complete, well formed, on a known route."},
	{"sluice_requests_refused_total", "counter", "endpoint, reason", "Requests that the router itself answered with an error, by the reason in X-Sluice-Reason: too_many_connections (limits.max_conns, limits.max_conns_per_ip or file descriptors exhausted), engine_connections (limits.engine_conns reached), decompression_busy (too many compressed bodies being decompressed)."},
	{"sluice_responses_total", "counter", "endpoint, code", "Responses ended, by HTTP status, whether or not the client read them to the end; 499: the client disconnected before its response was written."},
	{"sluice_request_duration_seconds", "histogram", "endpoint", "Time from the request's head to the end of the response, whether or not the client read it to the end."},
	{"sluice_time_to_first_token_seconds", "histogram", "endpoint", "Time from the request's head to the first token of a streamed response."},
	{"sluice_client_connections", "gauge", "", "Open client connections."},
	{"sluice_fd_limit_events_total", "counter", "event", "Events caused by a shortage of file descriptors: accept_failed (accept paused), rejected (new connections answered with 503), idle_closed (idle keep-alive connections closed)."},
	{"sluice_log_lines_dropped_total", "counter", "", "Lines of the router's own log that were dropped, because the reader of its output had stalled."},
	{"sluice_access_log_lines_total", "counter", "result", "Lines of the access log: written, dropped (the output is slower than the requests) or failed (the output returned an error)."},
	{"sluice_traces_total", "counter", "result", "Traces: exported, dropped (the queue was full) or failed (the collector did not accept them)."},
	{"sluice_panics_total", "counter", "", "Recovered panics of handlers; each is logged with its stack. Any value above 0 is a bug."},

	{"sluice_legs_total", "counter", "leg, outcome", "Engine calls ended, by leg (prefill, decode, whole) and outcome (ok, the engine's status class, or a reason)."},
	{"sluice_legs_in_flight", "gauge", "leg", "Engine calls in progress."},
	{"sluice_leg_duration_seconds", "histogram", "leg", "Duration of engine calls."},
	{"sluice_leg_retries_total", "counter", "leg", "Legs that were run again on another rank."},
	{"sluice_fallbacks_total", "counter", "kind", "Requests whose prefill/decode plan was changed, by reason (incomplete_handle, decode_only, lease_expired, prefill_failed, …)."},
	{"sluice_models_without_handover", "gauge", "", "Models whose last requests (10 or more in a row) were all decoded without the hand-over that pd configures, because no prefill worker is healthy or the prefill responses cannot be handed over; /readyz, /health and the log give the reason."},
	{"sluice_migrations_total", "counter", "outcome", "Streams whose engine failed: done (continued on another engine), failed (no other engine continued them), limit, or the reason why they could not move; drained: moved away from a draining worker (docs/migration.md)."},
	{"sluice_plans_total", "counter", "plan, reason", "Decisions between prefill on another rank (plan remote) and on the decode rank (local), by reason (few_uncached, faster, uncached, unknown_prompt; not_considered: only the ranks were chosen jointly), and prefill-only requests (prefill_only), by trigger (header, max_tokens)."},
	{"sluice_prefill_prompts_total", "counter", "form", "Prefill legs by the form of their prompt, with `pd.prefill_by_ids`: ids; text, because the request, the family or the engine allows no ids; unverified: text, because the ids have not been compared with this engine process; refused: text, because the engine process has refused ids."},

	{"sluice_responses_incomplete_total", "counter", "cause", "Non-streaming responses that the client did not read completely, by cause (client_stalled: nothing read within timeouts.write, client_gone, drained)."},

	{"sluice_streams_total", "counter", "cause", "Relayed responses ended, by cause. Relayed are streams and JSON responses over 1 MiB. completed: the response was complete; client_gone, client_stalled, drained, deadline; engine_closed, engine_stalled; cancelled: the router cancelled it; engine_protocol_error: invalid framing; engine_incomplete: correct framing but an incomplete response; engine_error: the engine sent an error event; memory_budget: `limits.memory_budget` had no room for a partial event."},
	{"sluice_stream_events_total", "counter", "", "Events relayed."},
	{"sluice_stream_bytes_total", "counter", "", "Body bytes relayed, framing included."},
	{"sluice_stream_unscanned_events_total", "counter", "", "Events too large for the scan, even without their long strings and nested parts: relayed, but not searched for usage."},
	{"sluice_stream_engine_errors_total", "counter", "", "Streams in which the engine sent an error event, whatever their cause of end."},

	{"sluice_output_tokens_total", "counter", "", "Generated tokens, as reported in the usage of streams."},
	{"sluice_model_requests_total", "counter", "model, outcome", "Requests to a model that have ended: ok, rejected (status 4xx), client_gone (the client left, or read nothing), failed (status 5xx, or the stream broke off). The first 100 models have series of their own; the others share the model other, here and in all sluice_model metrics."},
	{"sluice_model_input_tokens_total", "counter", "model", "Prompt tokens of answered requests, as reported by the engine or counted by the router."},
	{"sluice_model_output_tokens_total", "counter", "model", "Generated tokens, as reported by the engine."},
	{"sluice_model_cached_tokens_total", "counter", "model", "Prompt tokens that the engine reported as cached; for a request with a prefill leg, those of its engine."},
	{"sluice_model_queue_seconds", "histogram", "model", "Time from the request's head until its first leg is sent: reading and tokenizing the prompt, waiting for a worker (queue_ms of the access log is that alone), and the choice."},
	{"sluice_model_time_to_first_token_seconds", "histogram", "model", "Time from the request's head to the first token of a streamed response."},
	{"sluice_model_inter_token_latency_seconds", "histogram", "model", "Time between the events of a stream after the first token. Events that arrive together share the time equally."},
	{"sluice_model_time_per_output_token_seconds", "histogram", "model", "Time from the first token to the end of a stream, divided by its output tokens less one; one observation for each stream whose engine reported usage."},
	{"sluice_model_leg_duration_seconds", "histogram", "model, leg", "Duration of successful engine calls: prefill, decode (the stream included), whole (a request that one rank serves alone)."},
	{"sluice_model_kv_transfer_seconds", "histogram", "model", "Duration of successful KV transfers from prefill to decode, as an engine reported it (transfers)."},
	{"sluice_model_request_duration_seconds", "histogram", "model", "Time from the request's head to the end of its response, of requests with outcome ok."},
	{"sluice_cache_prompt_tokens_total", "counter", "", "Prompt tokens of requests with a predicted overlap, zero included."},
	{"sluice_cache_predicted_tokens_total", "counter", "", "Of those, tokens predicted to be cached on the chosen rank."},
	{"sluice_cache_compared_prompt_tokens_total", "counter", "", "Prompt tokens of requests for which the engine reported its cached tokens."},
	{"sluice_cache_compared_predicted_tokens_total", "counter", "", "Of those, tokens predicted to be cached."},
	{"sluice_cache_reported_tokens_total", "counter", "", "Of those, tokens the engine reported as cached: over the prompt's, the actual hit rate."},
	{"sluice_cache_prediction_error_tokens_total", "counter", "", "Sum of the absolute differences between predicted and reported cached tokens."},

	{"sluice_worker_state", "gauge", "worker, role, state", "1 for the state the worker is in."},
	{"sluice_engine_frozen_total", "counter", "state", "Ranks found frozen, by state: process (accepts connections but answers nothing), core (the API server answers but no request advances), host (no connection can be made)."},
	{"sluice_engine_frozen_calls_total", "counter", "state", "Engine calls ended because the engine was found frozen. Their streams migrate; other requests run again where possible."},
	{"sluice_engine_frozen_ranks", "gauge", "state", "Ranks that are frozen now. They are in no pool until they show a sign of life."},
	{"sluice_engine_restarts_total", "counter", "evidence", "New engine processes found at a worker's address, by evidence: start_time, metrics_created, counters_reset, connection_refused, event_sources, engine_id (changed in a hand-over). The index drops the blocks of the old process. Restarts that KV events show first count in kind restarts of sluice_kv_feed_total."},
	{"sluice_rank_info", "gauge", "worker, rank, role, model", "1, with the rank's role and first model: joins them to other series of the rank. The first 2,000 ranks, by name, have series."},
	{"sluice_metrics_hidden_ranks", "gauge", "", "Ranks without series, because there are more than 2,000. The admin API lists them."},
	{"sluice_rank_legs_total", "counter", "worker, rank, leg, outcome", "Engine calls ended, by rank."},
	{"sluice_rank_leg_seconds_total", "counter", "worker, rank, leg", "Summed duration of successful engine calls, by rank: over those of sluice_rank_legs_total with outcome ok, their mean."},
	{"sluice_rank_requests", "gauge", "worker, rank", "Requests that this router placed on the rank and that have not ended."},
	{"sluice_rank_prefill_tokens", "gauge", "worker, rank", "Prompt tokens reserved on the rank and not yet computed."},
	{"sluice_rank_decode_blocks", "gauge", "worker, rank", "KV blocks reserved on the rank by requests being decoded."},
	{"sluice_rank_engine_running", "gauge", "worker, rank", "Running requests, as reported by the engine; absent until it reports."},
	{"sluice_rank_engine_waiting", "gauge", "worker, rank", "Waiting requests, as reported by the engine; absent until it reports."},
	{"sluice_rank_engine_queued_tokens", "gauge", "worker, rank", "Prompt tokens that the engine's waiting requests have yet to compute, as reported in its load messages; absent without them."},
	{"sluice_rank_kv_usage_ratio", "gauge", "worker, rank", "Fraction of KV blocks in use, as reported by the engine."},
	{"sluice_rank_breaker_state", "gauge", "worker, rank", "0: closed; 1: half open, one request at a time; 2: open, not chosen."},
	{"sluice_rank_prefill_token_seconds", "gauge", "worker, rank", "Learned time to compute one prompt token; absent until learned, and while it is like that of the fleet."},
	{"sluice_rank_transfer_token_seconds", "gauge", "worker, rank", "Learned time to transfer the KV of one prompt token; absent until learned, and while it is like that of the fleet."},
	{"sluice_rank_decode_block_seconds", "gauge", "worker, rank", "Learned time that one resident KV block adds to a decode step; absent until learned, and while it is like that of the fleet."},
	{"sluice_rank_cached_blocks", "gauge", "worker, rank", "KV blocks that the index records for the rank."},
	{"sluice_rank_feed_live", "gauge", "worker, rank", "1 while the rank's KV events are contiguous, so that its overlap can be trusted. 0 also for an engine without replay that has sent no event yet."},
	{"sluice_kv_feed_total", "counter", "worker, rank, kind", "Messages and blocks of the rank's KV event feed (batches, stored, removed, cleared, duplicate, unknown_removed, orphans, ignored) faults (gaps, tail_checks, resyncs, replays, replayed_batches, replay_failures, restarts, resets, malformed, oversize, wrong_rank), and blocks that are or may be on another machine (remote, unknown_locality)."},
	{"sluice_kv_uncredited_blocks_total", "counter", "medium, locality", "KV blocks that engines stored and that are credited to no worker: medium FS, OBJ, STORAGE, EXTERNAL, other; locality remote (the engine says so) or unspecified (storage that may be another machine's)."},

	{"sluice_kv_index_blocks", "gauge", "", "Entries (rank, tier, block) of the KV index."},
	{"sluice_kv_index_bytes", "gauge", "", "Memory the KV index takes."},
	{"sluice_kv_index_evicted_total", "counter", "", "Entries evicted because of index.max_bytes, the least recently used ends of prompts first; blocks that ranks hold beyond them are unknown to the router."},
	{"sluice_kv_snapshots_total", "counter", "outcome", "Snapshots of the KV index (index.snapshot): written, failed."},
	{"sluice_kv_snapshot_timestamp_seconds", "gauge", "", "Unix time of the last snapshot; 0: none since the start."},
	{"sluice_kv_snapshot_ranks_restored_total", "counter", "", "Ranks whose blocks were restored from the snapshot. Blocks of an engine that could not be verified are dropped again (kinds restarts and resets of sluice_kv_feed_total)."},
	{"sluice_kv_approx_blocks", "gauge", "", "Entries of the approximate index (text mode, engines without events)."},
	{"sluice_kv_approx_bytes", "gauge", "", "Memory the approximate index takes."},
	{"sluice_kv_approx_evicted_total", "counter", "", "Entries evicted because of their share of a quarter of index.max_bytes, the least recently used first."},
	{"sluice_relay_threads", "gauge", "", "Event loops that drive streams; 0: each stream has a goroutine (relay.driver, or event loops are unavailable)."},
	{"sluice_relay_loop_streams", "gauge", "", "HTTP streams that event loops drive now. Goroutines drive streams over TLS and compressed streams; the framed socket has event loops of its own."},
	{"sluice_sessions", "gauge", "", "Sessions that the router remembers (docs/sessions.md)."},
	{"sluice_sessions_active", "gauge", "", "Sessions with a request in progress, or whose last one ended less than sessions.hold ago."},
	{"sluice_sessions_active_tokens", "gauge", "", "Tokens of KV that the active sessions need and do not share."},
	{"sluice_sessions_limited_models", "gauge", "", "Models whose active sessions are limited, because sessions lost their KV to each other (sessions.limit_active)."},
	{"sluice_sessions_limit_tokens", "gauge", "", "Tokens of KV that the active sessions of these models may need."},
	{"sluice_session_turns_waiting", "gauge", "", "Requests that wait until their session may be active. They count in sluice_admission_waiting_requests too."},
	{"sluice_session_waits_total", "counter", "outcome", "Requests that had to wait until their session was active, by the end of the wait: started, overran (sessions.max_wait, half of the class's max_wait or the latest start for the request's target passed; it then waits for a rank alone), client_gone, refused. The requests count in sluice_admission_enqueued_total too."},
	{"sluice_session_requests_total", "counter", "source", "Requests of a session, by the header or the member of the body that named it."},
	{"sluice_sessions_ended_total", "counter", "reason", "Sessions that the router has forgotten: finished (by their client), expired (sessions.expire), evicted (sessions.max)."},
	{"sluice_admission_waiting_requests", "gauge", "class", "Requests waiting for a rank that can start them, by admission class, against admission.max_requests (docs/admission.md)."},
	{"sluice_admission_waiting_tokens", "gauge", "class", "Tokens of the waiting requests: uncached prompt and expected output."},
	{"sluice_admission_oldest_wait_seconds", "gauge", "class", "How long the first of the waiting requests has waited."},
	{"sluice_admission_enqueued_total", "counter", "class", "Requests that had to wait. A request that a rank could start at once does not count here."},
	{"sluice_admission_ended_total", "counter", "class, outcome", "Waits that ended, by outcome: dispatched, displaced (another request with a larger claim took the place), client_gone, timeout (admission.max_wait)."},
	{"sluice_admission_refused_total", "counter", "class, reason", "Requests that were refused instead of dispatched, by the reason in X-Sluice-Reason."},
	{"sluice_admission_wait_seconds", "histogram", "class", "Wait of dispatched requests that had to wait."},
	{"sluice_admission_forecast_error_seconds", "histogram", "class", "Difference between the forecast of a wait and the wait, either way, of dispatched requests."},
	{"sluice_admission_preemptions_total", "counter", "class", "Streams of the class that were suspended for a request of a higher class (admission.preemption)."},
	{"sluice_admission_suspended_streams", "gauge", "class", "Streams that are suspended now. They count among the waiting requests too."},
	{"sluice_admission_suspensions_ended_total", "counter", "class, outcome", "Suspensions that ended, by outcome: resumed, client_gone, deadline, failed (no engine continued the stream)."},
	{"sluice_admission_suspension_seconds", "histogram", "class", "Time that a stream was suspended."},
	{"sluice_admission_tenant_waiting_requests", "gauge", "tenant", "Requests of a tenant that wait, in all classes. Tenants are labelled as in sluice_admission_tenant_requests_total, those that have waited at a scrape."},
	{"sluice_admission_tenant_oldest_wait_seconds", "gauge", "tenant", "How long the first of a tenant's waiting requests has waited."},
	{"sluice_admission_tenant_requests_total", "counter", "tenant, outcome", "Waits that ended, refusals (refused) and suspensions of streams (preempted), by tenant: the first 200 one by one, the others as other; none: requests without a tenant. A tenant that has one of these names is shown in quotation marks."},
	{"sluice_pool_waiters", "gauge", "", "Requests waiting for a pool to have a healthy worker, against limits.pool_waiters."},
	{"sluice_engine_api_certificate_expiry_timestamp_seconds", "gauge", "", "Unix time at which the certificate of the framed socket expires; absent without TLS."},
	{"sluice_engine_api_connections", "gauge", "", "Connections of the framed engine socket."},
	{"sluice_engine_api_streams", "gauge", "", "Requests in progress on the framed engine socket."},
	{"sluice_engine_api_stalled_total", "counter", "", "Streams of the framed engine socket ended because the caller read nothing."},
	{"sluice_engine_api_request_bytes", "gauge", "", "Memory that requests of the framed engine socket hold, against limits.memory_budget."},
	{"sluice_engine_api_requests_total", "counter", "", "Preprocessed requests over the framed socket and POST /v1/engine/generate."},
	{"sluice_engine_api_refused_total", "counter", "", "Preprocessed requests refused because of their content, before any engine was called."},
	{"sluice_retries_denied_total", "counter", "", "Retries not made because their pool's budget was spent (fleet.retry_budget_ratio)."},
	{"sluice_load_messages_total", "counter", "kind", "Load messages of engines: applied, malformed, wrong_rank (a rank that the worker does not have)."},
	{"sluice_kv_handles_leased", "gauge", "", "Hand-overs whose blocks a prefill worker keeps for a decode leg that has not started."},
	{"sluice_kv_orphan_ranks", "gauge", "", "Ranks with 32 or more consecutive stored events whose parent block is unknown. The index finds no prompt on them."},
	{"sluice_kv_notification_breakers_open", "gauge", "", "Prefill ranks that get no hand-overs because their completion notifications do not arrive (pd.completion_timeout)."},
	{"sluice_kv_notifications_total", "counter", "outcome", "LMCache notifications: received; of these early (before a request waited), expired (no request waited), dropped (table full); in addition not_a_notification (other LMCache messages) and malformed messages."},
	{"sluice_kv_notifications_unmatched", "gauge", "", "Notifications for which no request waits yet."},
	{"sluice_zmq_connections", "gauge", "socket", "Connections to the router's ZMQ sockets: lmcache (notifications), reports (of connectors)."},
	{"sluice_zmq_refused_total", "counter", "socket, reason", "Connections to those sockets that were closed: network (outside the allowed networks), at_capacity (too many), protocol_error (not a ZMTP 3 PUSH socket, a frame too long, or too slow)."},
	{"sluice_kv_tier_up", "gauge", "tier", "1 while this tier can report KV transfers: nixl, ucx, zmq; http (the engines' responses) always can."},
	{"sluice_kv_transfers_pending", "gauge", "", "Hand-overs whose outcome the router waits for."},
	{"sluice_kv_transfers_total", "counter", "outcome", "Observed hand-overs by outcome: done, failed, expired (prefill freed the blocks unread), stalled (transfers.stall_timeout), unknown (no report)."},
	{"sluice_kv_reports_total", "counter", "report", "Reports of connectors by event (recv, sent, expired) and status (ok, failed); unknown: no hand-over waited for it; malformed; refused: a record or nonce without a matching completion slot; not_a_report: another message; unauthenticated: a UCX message without the connectors' secret; at_capacity: a hand-over without a slot, because too many were observed."},
	{"sluice_kv_side_channel_total", "counter", "outcome", "Requests whose lease was renewed or whose blocks were released on a prefill engine (transfers.side_channel); failed: messages that could not be sent."},
	{"sluice_kv_rank_transfers_total", "counter", "from, to", "Reported KV transfers between two ranks; only the first 1,024 pairs have series."},
	{"sluice_kv_rank_transfer_bytes_per_second", "gauge", "from, to", "Moving average of the bandwidth of transfers of at least 64 KiB."},
	{"sluice_kv_rank_transfer_token_seconds", "gauge", "from, to", "Moving average of the transfer time per prompt token; absent after two minutes without a transfer. From the fourth transfer on the scheduler uses it for the pair."},
	{"sluice_prompts_total", "counter", "source", "Prompts by the source of their token ids (request; native: this process; cache, engine: an engine's /tokenize; text: no ids, routed by text; none: neither)."},
	{"sluice_tokenizer_coalesced_total", "counter", "", "Prompts that waited for the lookup of an identical prompt."},
	{"sluice_tokenizer_backed_off_total", "counter", "", "Prompts not sent to an engine's /tokenize because it had just failed."},
	{"sluice_tokenizer_refused_total", "counter", "", "Lookups that an engine answered with a 4xx."},
	{"sluice_tokenizer_failed_total", "counter", "", "Lookups that failed for any other reason, timeouts included."},
	{"sluice_tokenizer_timeouts_total", "counter", "", "Lookups that took longer than tokens.timeout."},
	{"sluice_tokenizer_native_models", "gauge", "state", "Models with a tokenizer folder: used, or mismatch, if their ids differed from an engine's, or failed, if they could not be loaded. The engines tokenize the prompts of the last two."},
	{"sluice_tokenizer_native_unmodelled_total", "counter", "", "Prompts of such models that only the engine can render, such as those with images."},
	{"sluice_tokenizer_native_failed_total", "counter", "", "Prompts that the tokenizer library did not render or encode."},
	{"sluice_tokenizer_native_cached_tokens_total", "counter", "", "Token ids that the tokenizer library did not have to encode again."},
	{"sluice_tokenizer_native_encoded_bytes_total", "counter", "", "Bytes of text that the tokenizer library has encoded."},
	{"sluice_tokenizer_checks_total", "counter", "", "Prompts whose ids were compared with an engine's."},
	{"sluice_tokenizer_checks_failed_total", "counter", "", "Comparisons for which the engine gave no ids, or that it did not outlive."},
	{"sluice_tokenizer_mismatches_total", "counter", "", "Comparisons in which the ids differed."},
	{"sluice_tokenizer_count_differences_total", "counter", "", "Answers that do not fit the ids of a prompt that the router has tokenized: the engine counted other tokens, or found more of them cached than its KV events had reported. The next prompt is compared, at most one a minute."},
	{"sluice_tokenizer_cache_entries", "gauge", "", "Prompts, and parts of prompts, in the token cache."},
	{"sluice_tokenizer_cache_bytes", "gauge", "", "Memory of the token cache."},
	{"sluice_api_key_requests_total", "counter", "key, outcome", "Requests by API key: admitted, limited (a limit of the key was reached; a request that the token limit refuses after admission counts as both)."},
	{"sluice_api_key_tokens_total", "counter", "key", "Prompt and output tokens charged to an API key."},
	{"sluice_certificate_expiry_timestamp_seconds", "gauge", "", "Unix time at which the certificate of the client listener expires; absent without TLS."},
	{"sluice_memory_budget_used_bytes", "gauge", "", "Memory counted against limits.memory_budget now."},
	{"sluice_memory_budget_limit_bytes", "gauge", "", "limits.memory_budget."},
	{"sluice_recording_entries_total", "counter", "", "Entries written to recordings (recording.dir, sluice record)."},
	{"sluice_recording_dropped_total", "counter", "", "Entries not recorded because the queue was full; the recording contains their number too."},
	{"sluice_recording_bytes_total", "counter", "", "Compressed bytes written to recordings."},
	{"sluice_recording_active", "gauge", "", "1 while a recording is in progress (recording.dir, sluice record). With recording.dir set, 0 means that it stopped, for example because the disk is full; the log gives the reason."},
	{"sluice_build_info", "gauge", "version", "1, with the version in its label."},
}

var families = func() map[string]*Family {
	m := make(map[string]*Family, len(Catalog))
	for i := range Catalog {
		m[Catalog[i].Name] = &Catalog[i]
	}
	return m
}()

// Document writes docs/metrics.md from the Catalog.
func Document(w io.Writer) {
	fmt.Fprint(w, `# Metrics

This page lists the router's metrics.
[observability.md](observability.md) says how to scrape them, and has the dashboards and alerts.

`+"```"+`
curl http://127.0.0.1:8080/metrics
`+"```"+`

The front and the admin listener serve them at `+"`/metrics`"+`, in the format that the Accept header asks for: the Prometheus text format 0.0.4, OpenMetrics, or protocol buffers.
Durations are in seconds, sizes in bytes.
A rank is one (worker, data-parallel rank).
Its series appear when its worker first becomes ready, and are gone from the next scrape when the worker leaves.
Series without a value yet are absent.
The number of series is [bounded](observability.md#cardinality); beyond a bound they share the value `+"`other`"+`.
The `+"`go_…` and `process_…`"+` series of Prometheus' Go library are served too.
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
