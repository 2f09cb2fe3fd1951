#!/usr/bin/env python3
"""Writes the Grafana dashboards in docs/observability/dashboards/.

  scripts/dashboards.py           writes them
  scripts/dashboards.py --check   fails if they are not current
"""
import json
import os
import sys

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "observability", "dashboards")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RANK = 'job=~"$job",instance=~"$instance",worker=~"$worker"'
ROUTER = 'job=~"$job",instance=~"$instance"'
MODEL = ROUTER + ',model=~"$model"'


def quantiles(metric, selector, by="le"):
    """Returns the targets of the median, p90 and p99 of a histogram."""
    legend = "".join(f"{{{{{label}}}}} " for label in by.replace(" ", "").split(",") if label != "le")
    return [(f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{{{selector}}}[$__rate_interval])))", legend + name)
            for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]


def rate(metric, selector, by):
    legend = " ".join(f"{{{{{label}}}}}" for label in by.replace(" ", "").split(",")) if by else metric
    return (f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))", legend)


def gauge(metric, selector, legend):
    return (f"{metric}{{{selector}}}", legend)


# Each panel: title, unit, targets, and a description of what to look for.
DASHBOARDS = {
    "fleet": ("Sluice: fleet", ["job", "instance"], [
        ("Requests", "reqps", [rate("sluice_model_requests_total", ROUTER, "outcome")], "Ended requests by outcome. failed counts against the error budget."),
        ("Time to first token", "s", quantiles("sluice_model_time_to_first_token_seconds", ROUTER), "All models."),
        ("Inter-token latency", "s", quantiles("sluice_model_inter_token_latency_seconds", ROUTER), "All models."),
        ("Tokens", "short", [(f"sum(rate(sluice_model_input_tokens_total{{{ROUTER}}}[$__rate_interval]))", "input"), (f"sum(rate(sluice_model_cached_tokens_total{{{ROUTER}}}[$__rate_interval]))", "of these cached"), (f"sum(rate(sluice_model_output_tokens_total{{{ROUTER}}}[$__rate_interval]))", "output")], "Tokens per second."),
        ("Workers by state", "short", [(f"count by (role, state) (sluice_worker_state{{{ROUTER}}})", "{{role}} {{state}}")], "unhealthy workers get no requests."),
        ("Requests in progress", "short", [(f"sum by (model, role) (sluice_rank_requests{{{ROUTER}}} * on (job, instance, worker, rank) group_left (model, role) sluice_rank_info)", "{{model}} {{role}}")], "Requests that this router placed on ranks."),
        ("Waiting in engines", "short", [(f"sum by (role) (sluice_rank_engine_waiting{{{ROUTER}}} * on (job, instance, worker, rank) group_left (role) sluice_rank_info)", "{{role}}")], "As engines report. A queue that grows needs more workers of that role."),
        ("KV use", "percentunit", [(f"max by (role) (sluice_rank_kv_usage_ratio{{{ROUTER}}} * on (job, instance, worker, rank) group_left (role) sluice_rank_info)", "{{role}} max"), (f"avg by (role) (sluice_rank_kv_usage_ratio{{{ROUTER}}} * on (job, instance, worker, rank) group_left (role) sluice_rank_info)", "{{role}} mean")], "Share of KV blocks in use."),
        ("Departures from the plan", "reqps", [rate("sluice_fallbacks_total", ROUTER, "kind")], "Fall-backs by kind."),
        ("Retries and migrations", "reqps", [rate("sluice_leg_retries_total", ROUTER, "leg"), rate("sluice_migrations_total", ROUTER, "outcome"), (f"sum(rate(sluice_retries_denied_total{{{ROUTER}}}[$__rate_interval]))", "retries denied")], "Denied retries mean that the budget of a pool is spent."),
        ("Frozen ranks, models without hand-over", "short", [(f"sum by (state) (sluice_engine_frozen_ranks{{{ROUTER}}})", "frozen {{state}}"), (f"sum(sluice_models_without_handover{{{ROUTER}}})", "models without hand-over")], "All should be 0."),
    ]),
    "model": ("Sluice: model", ["job", "instance", "model"], [
        ("Requests", "reqps", [rate("sluice_model_requests_total", MODEL, "model, outcome")], "Ended requests."),
        ("Failed requests", "percentunit", [('model:sluice_failed_requests:ratio_rate5m{model=~"$model"}', "{{model}} 5m"), ('model:sluice_failed_requests:ratio_rate1h{model=~"$model"}', "{{model}} 1h")], "Recording rules; the objective is 0.1 %."),
        ("Slow first tokens", "percentunit", [('model:sluice_slow_first_tokens:ratio_rate5m{model=~"$model"}', "{{model}} 5m"), ('model:sluice_slow_first_tokens:ratio_rate1h{model=~"$model"}', "{{model}} 1h")], "Recording rules; the objective is 1 % over 2 s."),
        ("Time to first token", "s", quantiles("sluice_model_time_to_first_token_seconds", MODEL, "le, model"), "From the request's head to the first token. Exemplars lead to traces."),
        ("Inter-token latency", "s", quantiles("sluice_model_inter_token_latency_seconds", MODEL, "le, model"), "Time between the events of a stream."),
        ("Time per output token", "s", quantiles("sluice_model_time_per_output_token_seconds", MODEL, "le, model"), "One value for each stream."),
        ("Queue", "s", quantiles("sluice_model_queue_seconds", MODEL, "le, model"), "Until the first leg is sent: tokenizing, waiting for a worker, the choice."),
        ("Prefill leg", "s", quantiles("sluice_model_leg_duration_seconds", MODEL + ',leg="prefill"', "le, model"), "Successful prefill calls."),
        ("KV transfer", "s", quantiles("sluice_model_kv_transfer_seconds", MODEL, "le, model"), "As engines report it; empty without reports of transfers."),
        ("Decode leg", "s", quantiles("sluice_model_leg_duration_seconds", MODEL + ',leg=~"decode|whole"', "le, model"), "Successful decode calls, streams included."),
        ("Whole request", "s", quantiles("sluice_model_request_duration_seconds", MODEL, "le, model"), "Requests with outcome ok."),
        ("Tokens", "short", [rate("sluice_model_input_tokens_total", MODEL, "model"), rate("sluice_model_output_tokens_total", MODEL, "model")], "Input and output tokens per second."),
        ("Cached share of the input", "percentunit", [('model:sluice_cached_tokens:ratio_rate5m{model=~"$model"}', "{{model}}")], "What engines reported as cached."),
    ]),
    "worker": ("Sluice: worker", ["job", "instance", "worker"], [
        ("State", "short", [gauge("sluice_worker_state", RANK, "{{worker}} {{role}} {{state}}")], "1 for the state that the worker is in."),
        ("Breakers", "short", [gauge("sluice_rank_breaker_state", RANK, "{{worker}}/{{rank}}")], "0 closed, 1 half open, 2 open: the rank gets no requests."),
        ("Legs", "reqps", [rate("sluice_rank_legs_total", RANK, "worker, rank, leg, outcome")], "Engine calls ended, by outcome."),
        ("Mean duration of legs", "s", [('rank_leg:sluice_leg_seconds:mean_rate5m{worker=~"$worker"}', "{{worker}}/{{rank}} {{leg}}")], "Recording rule; successful calls."),
        ("Requests", "short", [gauge("sluice_rank_requests", RANK, "{{worker}}/{{rank}} placed"), gauge("sluice_rank_engine_running", RANK, "{{worker}}/{{rank}} running"), gauge("sluice_rank_engine_waiting", RANK, "{{worker}}/{{rank}} waiting")], "Placed by this router; running and waiting as the engine reports."),
        ("Reserved prompt tokens", "short", [gauge("sluice_rank_prefill_tokens", RANK, "{{worker}}/{{rank}}")], "Not yet computed."),
        ("Reserved decode blocks", "short", [gauge("sluice_rank_decode_blocks", RANK, "{{worker}}/{{rank}}")], "KV blocks of requests being decoded."),
        ("KV use", "percentunit", [gauge("sluice_rank_kv_usage_ratio", RANK, "{{worker}}/{{rank}}")], "Share of KV blocks in use, as the engine reports."),
        ("Learned time of a prompt token", "s", [gauge("sluice_rank_prefill_token_seconds", RANK, "{{worker}}/{{rank}}")], "What the scheduler expects."),
        ("Learned time of a decode block", "s", [gauge("sluice_rank_decode_block_seconds", RANK, "{{worker}}/{{rank}}")], "What one resident block adds to a step."),
        ("Cached blocks", "short", [gauge("sluice_rank_cached_blocks", RANK, "{{worker}}/{{rank}}")], "Blocks that the index records."),
        ("KV events", "short", [gauge("sluice_rank_feed_live", RANK, "{{worker}}/{{rank}} live"), rate("sluice_kv_feed_total", RANK + ',kind=~"gaps|replay_failures|restarts|resets|malformed|orphans"', "worker, rank, kind")], "live should be 1; the rest are faults per second."),
    ]),
    "kv": ("Sluice: KV and transfers", ["job", "instance"], [
        ("Cache hits", "percentunit", [(f"sum(rate(sluice_cache_compared_predicted_tokens_total{{{ROUTER}}}[$__rate_interval])) / sum(rate(sluice_cache_compared_prompt_tokens_total{{{ROUTER}}}[$__rate_interval]))", "predicted"), (f"sum(rate(sluice_cache_reported_tokens_total{{{ROUTER}}}[$__rate_interval])) / sum(rate(sluice_cache_compared_prompt_tokens_total{{{ROUTER}}}[$__rate_interval]))", "reported")], "Share of prompt tokens that were cached, for requests whose engine reported it. A wide gap means that the index is wrong."),
        ("Error of the prediction", "percentunit", [(f"sum(rate(sluice_cache_prediction_error_tokens_total{{{ROUTER}}}[$__rate_interval])) / sum(rate(sluice_cache_compared_prompt_tokens_total{{{ROUTER}}}[$__rate_interval]))", "error")], "Mean absolute error over prompt tokens."),
        ("Index entries", "short", [gauge("sluice_kv_index_blocks", ROUTER, "events"), gauge("sluice_kv_approx_blocks", ROUTER, "approximate")], "Entries (rank, tier, block)."),
        ("Index memory", "bytes", [gauge("sluice_kv_index_bytes", ROUTER, "events"), gauge("sluice_kv_approx_bytes", ROUTER, "approximate")], "Against index.max_bytes."),
        ("Evicted entries", "short", [(f"sum(rate(sluice_kv_index_evicted_total{{{ROUTER}}}[$__rate_interval]))", "events"), (f"sum(rate(sluice_kv_approx_evicted_total{{{ROUTER}}}[$__rate_interval]))", "approximate")], "Raise index.max_bytes if this does not end."),
        ("KV events", "short", [rate("sluice_kv_feed_total", ROUTER, "kind")], "Messages and blocks per second."),
        ("Hand-overs in progress", "short", [gauge("sluice_kv_handles_leased", ROUTER, "leased"), gauge("sluice_kv_orphan_ranks", ROUTER, "orphan ranks"), gauge("sluice_kv_notification_breakers_open", ROUTER, "open notification breakers")], "Handles whose blocks a prefill worker keeps."),
        ("Tiers of notifications", "short", [gauge("sluice_kv_tier_up", ROUTER, "{{tier}}")], "1 while the tier can report transfers."),
        ("Transfers", "ops", [rate("sluice_kv_transfers_total", ROUTER, "outcome")], "Observed hand-overs; absent without reports."),
        ("KV transfer", "s", quantiles("sluice_model_kv_transfer_seconds", ROUTER), "As engines report it."),
        ("Bandwidth between ranks", "Bps", [(f"topk(10, sluice_kv_rank_transfer_bytes_per_second{{{ROUTER}}})", "{{from}} → {{to}}")], "The ten fastest pairs."),
        ("Reports of connectors", "ops", [rate("sluice_kv_reports_total", ROUTER, "report")], "failed, refused and unauthenticated should stay at 0."),
    ]),
    "router": ("Sluice: router", ["job", "instance"], [
        ("CPU", "percentunit", [(f"rate(process_cpu_seconds_total{{{ROUTER}}}[$__rate_interval])", "{{instance}}")], "Cores in use."),
        ("Memory", "bytes", [gauge("process_resident_memory_bytes", ROUTER, "{{instance}} resident"), gauge("go_memstats_heap_inuse_bytes", ROUTER, "{{instance}} heap")], "Resident memory and Go's heap."),
        ("Memory budget", "percentunit", [(f"sluice_memory_budget_used_bytes{{{ROUTER}}} / sluice_memory_budget_limit_bytes{{{ROUTER}}}", "{{instance}}")], "Share of limits.memory_budget; at 100 % requests are refused."),
        ("Connections", "short", [gauge("sluice_client_connections", ROUTER, "{{instance}} clients"), gauge("sluice_relay_loop_streams", ROUTER, "{{instance}} streams on loops"), gauge("sluice_pool_waiters", ROUTER, "{{instance}} waiting for a worker")], "Open client connections, and what they do."),
        ("File descriptors", "percentunit", [(f"process_open_fds{{{ROUTER}}} / process_max_fds{{{ROUTER}}}", "{{instance}}")], "Near 100 %, connections are refused."),
        ("Responses", "reqps", [rate("sluice_responses_total", ROUTER, "endpoint, code")], "By route and status."),
        ("Refused requests", "reqps", [rate("sluice_requests_refused_total", ROUTER, "reason")], "By the reason in X-Sluice-Reason."),
        ("Legs in flight", "short", [gauge("sluice_legs_in_flight", ROUTER, "{{instance}} {{leg}}")], "Engine calls in progress."),
        ("Streams", "reqps", [rate("sluice_streams_total", ROUTER, "cause")], "Relayed responses by cause of end."),
        ("Events and bytes", "short", [(f"sum(rate(sluice_stream_events_total{{{ROUTER}}}[$__rate_interval]))", "events"), (f"sum(rate(sluice_stream_bytes_total{{{ROUTER}}}[$__rate_interval]))", "bytes")], "Per second."),
        ("Token ids of prompts", "reqps", [rate("sluice_prompts_total", ROUTER, "source")], "engine costs a call of /tokenize."),
        ("Goroutines", "short", [gauge("go_goroutines", ROUTER, "{{instance}}")], "Streams on event loops need none."),
        ("Delay of goroutines", "s", [(f"histogram_quantile(0.99, sum by (le) (rate(go_sched_latencies_seconds_bucket{{{ROUTER}}}[$__rate_interval])))", "p99")], "Time that a goroutine waits for a core. Over some ms, the router needs more cores."),
        ("Restarts, panics", "short", [(f"sum(increase(sluice_panics_total{{{ROUTER}}}[1h]))", "panics in an hour"), (f"sum(increase(sluice_fd_limit_events_total{{{ROUTER}}}[1h]))", "events of the descriptor limit")], "Both should be 0."),
        ("Certificates", "s", [(f"sluice_certificate_expiry_timestamp_seconds{{{ROUTER}}} - time()", "{{instance}} clients"), (f"sluice_engine_api_certificate_expiry_timestamp_seconds{{{ROUTER}}} - time()", "{{instance}} engine API")], "Time until a certificate expires."),
        # Two rows of the admission queue: the panels before fill theirs.
        ("Waiting for admission", "short", [(f"sum by (class) (sluice_admission_waiting_requests{{{ROUTER}}})", "{{class}}"), (f"sum by (class) (sluice_admission_suspended_streams{{{ROUTER}}})", "{{class}}, suspended streams")], "Requests that no rank can start soon, by class, against admission.max_requests."),
        ("Oldest wait for admission", "s", [(f"max by (class) (sluice_admission_oldest_wait_seconds{{{ROUTER}}})", "{{class}}")], "How long the first request of a class has waited. At admission.max_wait it is refused."),
        ("Waits for admission", "s", quantiles("sluice_admission_wait_seconds", ROUTER, "le, class"), "Of requests that waited and were dispatched."),
        ("Ended waits for admission", "reqps", [rate("sluice_admission_ended_total", ROUTER, "class, outcome")], "dispatched, or refused after a wait: displaced, timeout."),
        ("Refused by admission", "reqps", [rate("sluice_admission_refused_total", ROUTER, "class, reason")], "By the reason in X-Sluice-Reason. Higher classes should have none."),
        ("Waiting tenants", "short", [(f"topk(10, sum by (tenant) (sluice_admission_tenant_waiting_requests{{{ROUTER}}}))", "{{tenant}}")], "The ten tenants with the most waiting requests."),
        ("API keys", "reqps", [rate("sluice_api_key_requests_total", ROUTER, "key, outcome")], "Requests by key."),
        ("Tokens of API keys", "short", [rate("sluice_api_key_tokens_total", ROUTER, "key")], "Tokens per second charged to a key."),
    ]),
}

VARIABLES = {
    "job": "label_values(sluice_build_info, job)",
    "instance": 'label_values(sluice_build_info{job=~"$job"}, instance)',
    "model": 'label_values(sluice_model_requests_total{job=~"$job"}, model)',
    "worker": 'label_values(sluice_worker_state{job=~"$job"}, worker)',
}


def dashboard(name):
    title, variables, panels = DASHBOARDS[name]
    return {
        "uid": "sluice-" + name, "title": title, "tags": ["sluice"], "schemaVersion": 39, "version": 1, "editable": True,
        "graphTooltip": 1, "refresh": "30s", "time": {"from": "now-1h", "to": "now"}, "timezone": "",
        "links": [{"type": "dashboards", "tags": ["sluice"], "asDropdown": False, "includeVars": True, "keepTime": True, "title": "Sluice", "icon": "external link", "tooltip": "", "targetBlank": False}],
        "annotations": {"list": []},
        "templating": {"list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}] + [
            {"name": v, "label": v.capitalize(), "type": "query", "datasource": SOURCE, "query": {"query": VARIABLES[v], "refId": v},
             "definition": VARIABLES[v], "refresh": 2, "includeAll": True, "allValue": ".*", "multi": True, "sort": 1,
             "current": {"text": ["All"], "value": ["$__all"]}} for v in variables]},
        "panels": [{
            "id": i + 1, "type": "timeseries", "title": title, "description": description, "datasource": SOURCE,
            "gridPos": {"h": 8, "w": 8, "x": i % 3 * 8, "y": i // 3 * 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never"}}, "overrides": []},
            "options": {"legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True}, "tooltip": {"mode": "multi", "sort": "desc"}},
            "targets": [{"refId": chr(65 + k), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "range": True, "exemplar": "_bucket" in expr}
                        for k, (expr, legend) in enumerate(targets)],
        } for i, (title, unit, targets, description) in enumerate(panels)],
    }


def main():
    check, stale = "--check" in sys.argv[1:], []
    for name in DASHBOARDS:
        path, text = os.path.join(FOLDER, name + ".json"), json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"
        if check:
            if not os.path.exists(path) or open(path).read() != text:
                stale.append(path)
        else:
            with open(path, "w") as f:
                f.write(text)
    if stale:
        sys.exit("dashboards: run scripts/dashboards.py; not current: " + ", ".join(map(os.path.relpath, stale)))


if __name__ == "__main__":
    main()
