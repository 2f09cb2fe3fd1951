#!/usr/bin/env python3
"""Tests traces against the real OpenTelemetry collector, over OTLP/gRPC and OTLP/HTTP.

  scripts/traces_test.py [COLLECTOR]

COLLECTOR is the program that scripts/collector.sh prints, which builds it once. For each protocol a router
in front of a pair of simulated P/D engines exports to a collector, which writes what it receives to a file.
The test reads the file: every request has one trace with the spans of docs/request-log.md, each below the
right parent, at times within its parent's, with the attributes of the conventions; the client's
traceparent is continued, and a failed request is marked. Then the collector ends, and requests succeed
without it while the router counts what is lost.
"""
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from bench_proxies import ROOT, SLUICE, free_port

CLIENT = 3  # SPAN_KIND_CLIENT
SERVER = 2
failures = []


def check(what, ok, detail=""):
    print(("ok    " if ok else "FAIL  ") + what + ("" if ok else ": %s" % (detail,)))
    if not ok:
        failures.append(what)


class Process:
    """A process whose output goes to a file; with first_line the first line of its output is kept."""

    def __init__(self, argv, log, first_line=False, env=None):
        self.log = log
        self.p = subprocess.Popen(argv, stdout=subprocess.PIPE if first_line else open(log, "w"), stderr=subprocess.STDOUT if not first_line else open(log, "w"),
                                  text=True, env=dict(os.environ, **(env or {})))
        self.addr = self.p.stdout.readline().strip() if first_line else ""

    def stop(self):
        if self.p.poll() is None:
            self.p.send_signal(signal.SIGTERM)
            try:
                self.p.wait(20)
            except subprocess.TimeoutExpired:
                self.p.kill()
                self.p.wait()


def until(what, condition, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        got = condition()
        if got:
            return got
        time.sleep(0.1)
    check(what, False, "not within %d s" % seconds)
    return None


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def ask(addr, path, body, **headers):
    """Returns the status and the text of the answer."""
    request = urllib.request.Request("http://%s%s" % (addr, path), json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as r:
            return r.status, r.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def start_collector(program, folder, grpc, http_port):
    config = os.path.join(folder, "collector.yaml")
    with open(config, "w") as f:
        f.write("""
receivers:
  otlp:
    protocols:
      grpc: {endpoint: "127.0.0.1:%d"}
      http: {endpoint: "127.0.0.1:%d"}
exporters:
  file: {path: "%s", flush_interval: 100ms}
service:
  telemetry: {metrics: {level: none}}
  pipelines:
    traces: {receivers: [otlp], exporters: [file]}
""" % (grpc, http_port, os.path.join(folder, "spans.json")))
    return Process([program, "--config", "file:" + config], os.path.join(folder, "collector.log"))


def value(v):
    (kind, x), = v.items()
    return int(x) if kind == "intValue" else x


def read_spans(path):
    """Returns the spans in the collector's file, with attributes as a dict, and the resources' attributes."""
    spans, resources = [], []
    if not os.path.exists(path):
        return spans, resources
    for line in open(path):
        if not line.endswith("\n"):
            break
        for rs in json.loads(line)["resourceSpans"]:
            resources.append({a["key"]: value(a["value"]) for a in rs["resource"]["attributes"]})
            for ss in rs["scopeSpans"]:
                for s in ss["spans"]:
                    s["attributes"] = {a["key"]: value(a["value"]) for a in s.get("attributes", [])}
                    s["begin"], s["end"] = int(s["startTimeUnixNano"]), int(s["endTimeUnixNano"])
                    spans.append(s)
    return spans, resources


def trace_of(path, request_id):
    """Returns the spans of a request's trace: by name, or None until its root is there."""
    spans, _ = read_spans(path)
    roots = [s for s in spans if s["attributes"].get("sluice.request.id") == request_id]
    return [s for s in spans if s["traceId"] == roots[0]["traceId"]] if roots else None


def check_tree(name, spans, want):
    """Checks that the trace has exactly these spans, as (name, parent's name), within their parents' times."""
    by_id = {s["spanId"]: s for s in spans}
    got = sorted((s["name"], by_id[s["parentSpanId"]]["name"] if s.get("parentSpanId") in by_id else "") for s in spans)
    check("%s: the spans and their parents" % name, got == sorted(want), got)
    slack = 2_000_000  # ns: times are taken by different clocks of one process
    late = [s["name"] for s in spans if s.get("parentSpanId") in by_id and s["name"] != "kv_transfer"
            and (s["begin"] < by_id[s["parentSpanId"]]["begin"] - slack or s["end"] > by_id[s["parentSpanId"]]["end"] + slack)]
    check("%s: every span lies within its parent" % name, not late, late)


def check_protocol(program, protocol, folder):
    os.makedirs(folder)
    grpc, http_port = free_port(), free_port()
    path = os.path.join(folder, "spans.json")
    collector = start_collector(program, folder, grpc, http_port)
    processes = [collector]
    try:
        until(protocol + ": the collector listens", lambda: reachable(http_port) and reachable(grpc))
        engines = [Process([SLUICE, "sim", "--role", role], os.path.join(folder, role + ".log"), first_line=True) for role in ("prefill", "decode")]
        processes += engines
        endpoint = "http://127.0.0.1:%d" % (grpc if protocol == "grpc" else http_port)
        admin = "127.0.0.1:%d" % free_port()
        router = Process([SLUICE, "serve", "--listen", "127.0.0.1:0", "--admin", admin, "--set", "admin.runtime_file=" + folder + "/admin.json",
                          "--set", "tracing.endpoint=" + endpoint, "--set", "tracing.protocol=" + protocol, "--set", "tracing.sample=1", "--pd", "nixl",
                          "--prefill", "http://" + engines[0].addr + ",id=p0", "--decode", "http://" + engines[1].addr + ",id=d0"],
                         os.path.join(folder, "router.log"), first_line=True,
                         env={"OTEL_SERVICE_NAME": "sluice-under-test", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test", "OTEL_BSP_SCHEDULE_DELAY": "100"})
        processes.append(router)
        until(protocol + ": the router is ready", lambda: answers("http://%s/readyz" % router.addr))
        check_requests(protocol, router, engines, path)
        check_losses(protocol, router, collector)
    finally:
        for p in reversed(processes):
            p.stop()


def reachable(port):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        c.connect()
        return True
    except OSError:
        return False
    finally:
        c.close()


def check_requests(protocol, router, engines, path):
    prompt = "Tell me of the sea and of the ships that sail on it. " * 20
    parent_trace, parent_span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "sim", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    status, text = ask(router.addr, "/v1/chat/completions", body, **{"X-Request-Id": "streamed", "Traceparent": "00-%s-%s-01" % (parent_trace, parent_span)})
    check(protocol + ": a P/D stream succeeds", status == 200 and "[DONE]" in text, (status, text[:200]))
    spans = until(protocol + ": its trace reaches the collector's file", lambda: trace_of(path, "streamed"))
    if not spans:
        return
    root = "chat sim"
    check_tree(protocol, spans, [(root, ""), ("tokenize", root), ("choose", root), ("choose", root), ("prefill", root), ("decode", root), ("stream", "decode")])
    by_name = {s["name"]: s for s in spans}
    top, prefill, decode = (by_name[n] for n in (root, "prefill", "decode"))
    check(protocol + ": the client's trace is continued", top["traceId"] == parent_trace and top["parentSpanId"] == parent_span, top)
    check(protocol + ": kinds of the spans", top["kind"] == SERVER and prefill["kind"] == decode["kind"] == CLIENT, [s["kind"] for s in spans])
    a = top["attributes"]
    want = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "sim", "http.request.method": "POST", "http.response.status_code": 200,
            "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions", "url.scheme": "http", "gen_ai.provider.name": "sluice", "client.address": "127.0.0.1", "gen_ai.usage.output_tokens": 8, "sluice.plan": "disaggregated",
            "sluice.pd.family": "nixl", "sluice.stream": True, "sluice.retries": 0}
    wrong = {k: a.get(k) for k in want if a.get(k) != want[k]}
    check(protocol + ": attributes of the request", not wrong, wrong)
    usage = json.loads([line for line in text.splitlines() if '"usage":{' in line][-1].removeprefix("data: "))["usage"]
    check(protocol + ": input tokens are the engine's", a.get("gen_ai.usage.input_tokens") == usage["prompt_tokens"], a)
    check(protocol + ": the first token's time lies in the request", 0 < a.get("sluice.time_to_first_token", 0) * 1e9 <= top["end"] - top["begin"], a)
    check(protocol + ": the workers of the legs", prefill["attributes"].get("sluice.worker") == "p0" and decode["attributes"].get("sluice.worker") == "d0", spans)
    for leg, engine in ((prefill, engines[0]), (decode, engines[1])):
        got = {k: leg["attributes"].get(k) for k in ("http.request.method", "server.address", "server.port", "gen_ai.provider.name", "gen_ai.operation.name", "gen_ai.request.model")}
        host, port = engine.addr.rsplit(":", 1)
        check(protocol + ": attributes of " + leg["name"], list(got.values()) == ["POST", host, int(port), "vllm", "chat", "sim"], got)
    check(protocol + ": decode begins after prefill", decode["begin"] >= prefill["end"], (prefill, decode))

    status, _ = ask(router.addr, "/v1/completions", {"model": "sim", "prompt": "not streamed", "max_tokens": 2}, **{"X-Request-Id": "whole"})
    spans = until(protocol + ": the trace of a request that is not streamed", lambda: trace_of(path, "whole"))
    root = "text_completion sim"
    if spans and status == 200:
        check_tree(protocol + ", not streamed", spans, [(root, ""), ("tokenize", root), ("choose", root), ("choose", root), ("prefill", root), ("decode", root)])
    status, _ = ask(router.addr, "/v1/completions", {"model": "absent", "prompt": "x"}, **{"X-Request-Id": "refused"})
    spans = until(protocol + ": the trace of a refused request", lambda: trace_of(path, "refused"))
    if spans:
        check(protocol + ": it says why", status == 404 and spans[0]["attributes"].get("error.type") == "unknown_model" and spans[0]["attributes"].get("http.response.status_code") == 404, spans)
    _, resources = read_spans(path)
    check(protocol + ": the resource is that of the OTEL_* variables", all(r.get("service.name") == "sluice-under-test" and r.get("deployment.environment.name") == "test" for r in resources), resources)


def check_losses(protocol, router, collector):
    collector.stop()
    bad = [s for s, _ in (ask(router.addr, "/v1/completions", {"model": "sim", "prompt": "without a collector %d" % i, "max_tokens": 2}) for i in range(20)) if s != 200]
    check(protocol + ": requests succeed without a collector", not bad, bad)

    def lost():
        text = urllib.request.urlopen("http://%s/metrics" % router.addr, timeout=5).read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("sluice_traces_total{") and 'result="exported"' not in line) >= 20

    check(protocol + ": the router counts the traces that are lost", bool(until(protocol + ": losses are counted", lost, 60)))


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else subprocess.run([os.path.join(ROOT, "scripts", "collector.sh")], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="sluice-traces-") as folder:
        for protocol in ("grpc", "http"):
            check_protocol(program, protocol, os.path.join(folder, protocol))
    if failures:
        print("traces: %d checks failed" % len(failures))
        sys.exit(1)
    print("traces: all checks passed")


if __name__ == "__main__":
    main()
