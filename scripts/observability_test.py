#!/usr/bin/env python3
"""Tests metrics, rules and dashboards with the real promtool and Prometheus.

  scripts/observability_test.py TOOLS            all
  scripts/observability_test.py TOOLS --rules    only the rules, which needs no router

TOOLS is the folder that scripts/prometheus.sh prints. The rest starts `bin/sluice demo` and a
Prometheus that scrapes it and evaluates the rules, and runs the query of every panel of every
dashboard: each must bring data back. Beside it runs a router with native histograms and traced
requests, whose histograms and exemplars Prometheus must have.
"""
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
FOLDER = os.path.join(ROOT, "docs", "observability")
# Series that the demo does not have, with the reason. A query may bring nothing back only if
# it uses one of them.
ABSENT = {
    "sluice_fallbacks_total": "no request departs from its plan",
    "sluice_leg_retries_total": "no engine fails",
    "sluice_migrations_total": "no engine fails",
    "sluice_requests_refused_total": "no request is refused",
    "sluice_model_kv_transfer_seconds_bucket": "its engines report no transfers",
    "sluice_kv_transfers_total": "its engines report no transfers",
    "sluice_kv_reports_total": "its engines report no transfers",
    "sluice_kv_rank_transfer_bytes_per_second": "its engines report no transfers",
    "sluice_certificate_expiry_timestamp_seconds": "no TLS",
    "sluice_engine_api_certificate_expiry_timestamp_seconds": "no TLS",
    "sluice_api_key_requests_total": "no API keys",
    "sluice_api_key_tokens_total": "no API keys",
    'kind=~"gaps|': "no feed has a fault",
    "sluice_rank_decode_block_seconds": "learned after a while",
    "sluice_rank_prefill_token_seconds": "learned after a while",
}
failures = []


def fail(text):
    failures.append(text)
    print("FAIL  " + text)


def run(what, *command, cwd=None, stdin=None):
    r = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True)
    if r.returncode:
        fail(f"{what}:\n{r.stdout}{r.stderr}")
    else:
        print("ok    " + what)


def check_rules(promtool):
    rules = os.path.join(FOLDER, "rules")
    run("promtool check rules", promtool, "check", "rules", "recording.yaml", "alerts.yaml", cwd=rules)
    run("promtool test rules", promtool, "test", "rules", "tests.yaml", cwd=rules)
    known = set(re.findall(r"^\| `(sluice_\w+)` \|", open(os.path.join(ROOT, "docs", "metrics.md")).read(), re.M))
    recorded = set(re.findall(r"record: (\S+)", open(os.path.join(rules, "recording.yaml")).read()))
    for path in glob.glob(os.path.join(FOLDER, "*", "*")):
        text = open(path).read()
        for name in set(re.findall(r"(?<![\w:/-])(?:\w+:)?sluice_\w+(?::\w+)?", text)):
            plain = re.sub(r"_(bucket|count|sum)$", "", name)
            if name not in known and plain not in known and name not in recorded:
                fail(f"{os.path.relpath(path, ROOT)} uses {name}, which neither docs/metrics.md nor recording.yaml has")
    tested = open(os.path.join(rules, "tests.yaml")).read()
    for alert in re.findall(r"alert: (\w+)", open(os.path.join(rules, "alerts.yaml")).read()):
        if not os.path.exists(os.path.join(ROOT, "docs", "runbooks", alert + ".md")):
            fail(f"the alert {alert} has no page docs/runbooks/{alert}.md")
        if alert not in tested:
            fail(f"tests.yaml does not test the alert {alert}")


def fetch(url, accept=None):
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept} if accept else {}), timeout=10) as r:
        return r.read().decode()


def await_(what, condition, seconds):
    by = time.monotonic() + seconds
    while time.monotonic() < by:
        try:
            if condition():
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.5)
    sys.exit(f"observability-test: {what} did not happen in {seconds} s")


def query(base, expr):
    answer = json.loads(fetch(base + "/api/v1/query?" + urllib.parse.urlencode({"query": expr})))
    return [s for s in answer["data"]["result"] if s["value"][1] != "NaN"]


def check_dashboards(base):
    bring, absent = 0, 0
    for path in sorted(glob.glob(os.path.join(FOLDER, "dashboards", "*.json"))):
        for panel in json.load(open(path))["panels"]:
            for target in panel["targets"]:
                expr = re.sub(r"\$(job|instance|model|worker)\b", ".*", target["expr"]).replace("$__rate_interval", "15s").replace("[1h]", "[15s]")
                what = f"{os.path.basename(path)}, panel \"{panel['title']}\": {expr}"
                try:
                    if query(base, expr):
                        bring += 1
                    elif any(name in expr for name in ABSENT):
                        absent += 1
                    else:
                        fail("no data: " + what)
                except OSError as e:
                    fail(f"{e}: {what}")
    print(f"ok    {bring} queries of panels bring data back, {absent} are about what the demo does not do")
    if bring < 90:
        fail(f"only {bring} queries bring data back")


def check_live_rules(base):
    for group in json.loads(fetch(base + "/api/v1/rules"))["data"]["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                fail(f"rule {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
            elif rule["type"] == "recording" and not query(base, rule["name"]) and not any(n in rule["query"] for n in ABSENT):
                fail(f"rule {rule['name']} records nothing")
    firing = {s["metric"]["alertname"] for s in query(base, 'ALERTS{alertstate="firing"}')}
    if firing:
        fail(f"alerts fire in a healthy demo: {firing}")
    print("ok    the rules evaluate, and no alert fires")


def main():
    tools = sys.argv[1]
    check_rules(os.path.join(tools, "promtool"))
    run("dashboards are current", sys.executable, os.path.join(ROOT, "scripts", "dashboards.py"), "--check")
    if "--rules" not in sys.argv[2:]:
        with tempfile.TemporaryDirectory(prefix="sluice-observability.") as work:
            demo = subprocess.Popen([os.path.join(ROOT, "bin", "sluice"), "demo", "--rate", "4", "--duration", "170s"], stdout=open(work + "/demo", "w"), stderr=subprocess.STDOUT)
            prometheus = native = None
            try:
                await_("the demo's address", lambda: re.search(r"API +http://(\S+)/v1", open(work + "/demo").read()), 20)
                router = re.search(r"API +http://(\S+)/v1", open(work + "/demo").read()).group(1)
                native = Native(work)
                # Shorter intervals than in production, so that the test takes a minute.
                rules = re.sub(r"interval: 30s", "interval: 2s", open(os.path.join(FOLDER, "rules", "recording.yaml")).read())
                open(work + "/recording.yaml", "w").write(rules)
                json.dump({
                    "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
                    "rule_files": [work + "/recording.yaml", os.path.abspath(os.path.join(FOLDER, "rules", "alerts.yaml"))],
                    "scrape_configs": [
                        {"job_name": "sluice", "static_configs": [{"targets": [router]}]},
                        {"job_name": "native", "always_scrape_classic_histograms": True, "static_configs": [{"targets": [native.address]}]},
                    ],
                }, open(work + "/prometheus.yml", "w"))
                prometheus = subprocess.Popen([os.path.join(tools, "prometheus"), "--config.file", work + "/prometheus.yml", "--storage.tsdb.path", work + "/data", "--web.listen-address", "127.0.0.1:0", "--log.level", "warn", "--enable-feature", "native-histograms,exemplar-storage"], stdout=open(work + "/log", "w"), stderr=subprocess.STDOUT)
                await_("Prometheus' address", lambda: listening(prometheus.pid), 30)
                base = "http://127.0.0.1:%d" % listening(prometheus.pid)
                await_("the first scrapes", lambda: len(query(base, "up == 1")) == 2, 60)
                for _ in range(5):
                    native.traced_request()
                    time.sleep(1)
                await_("30 s of scrapes", lambda: float(query(base, "min(count_over_time(up[10m]))")[0]["value"][1]) >= 15 if query(base, "up") else False, 120)
                await_("the recording rules", lambda: query(base, "rank_leg:sluice_leg_seconds:mean_rate5m"), 60)
                check_dashboards(base)
                check_live_rules(base)
                native.check(base)
                for accept in ("", "application/openmetrics-text;version=1.0.0"):
                    page = fetch(f"http://{router}/metrics", accept)
                    if not accept:
                        run("promtool check metrics", os.path.join(tools, "promtool"), "check", "metrics", stdin=page)
                    elif not page.endswith("# EOF\n"):
                        fail("OpenMetrics does not end with # EOF")
            finally:
                if native:
                    native.close()
                for process in (prometheus, demo):
                    if process:
                        process.terminate()
                        process.wait(20)
                if failures and os.path.exists(work + "/log"):
                    print(open(work + "/log").read()[-2000:])
    if failures:
        sys.exit(f"observability-test: {len(failures)} checks failed")
    print("observability-test: all checks passed")


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Native:
    """A router with native histograms in front of one simulated engine."""

    def __init__(self, work):
        self.log, binary = work + "/native", os.path.join(ROOT, "bin", "sluice")
        self.engine = subprocess.Popen([binary, "sim", "--listen", "127.0.0.1:0", "--speed", "5"], stdout=open(work + "/sim", "w"), stderr=subprocess.STDOUT)
        self.router = None
        try:
            engine = printed_address(work + "/sim")
            self.router = subprocess.Popen([binary, "serve", "--engine", "http://" + engine, "--listen", "127.0.0.1:0", "--admin", "off", "--set", "metrics.native_histograms=true"], stdout=open(self.log, "w"), stderr=subprocess.DEVNULL)
            self.address = printed_address(self.log)
            await_("a ready router", lambda: fetch(f"http://{self.address}/readyz"), 20)
        except SystemExit:
            print(open(self.log).read() if os.path.exists(self.log) else "", open(work + "/sim").read())
            self.close()
            raise

    def traced_request(self):
        body = {"model": "sim", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
        request = urllib.request.Request(f"http://{self.address}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
        with urllib.request.urlopen(request, timeout=20) as r:
            r.read()

    def check(self, base):
        name = "sluice_model_time_to_first_token_seconds"
        for selector in ("", "_bucket"):
            if not query(base, f'histogram_quantile(0.5, sum by (le) (rate({name}{selector}{{job="native"}}[30s])))'):
                fail(f"no {'classic' if selector else 'native'} histogram of the router with native ones")
        if query(base, f'{name}{{job="sluice"}}'):
            fail("the demo has a native histogram without the option")
        query_of = {"query": name + '_bucket{job="native"}', "start": time.time() - 300, "end": time.time()}
        found = json.loads(fetch(base + "/api/v1/query_exemplars?" + urllib.parse.urlencode(query_of)))["data"]
        ids = {e["labels"].get("trace_id") for series in found for e in series["exemplars"]}
        if ids != {TRACE}:
            fail(f"exemplars have the trace ids {ids}, want {TRACE}")
        print("ok    Prometheus has native and classic histograms, and exemplars")

    def close(self):
        for process in (self.router, self.engine):
            if process:
                process.terminate()
                process.wait(20)


def printed_address(path):
    """Waits until a process has printed the address on which it listens, and returns it."""
    line = re.compile(r"^(127\.0\.0\.1:\d+)$", re.M)
    await_("an address in " + os.path.basename(path), lambda: line.search(open(path).read()), 20)
    return line.search(open(path).read()).group(1)


def listening(pid):
    """Returns the TCP port on which the process listens, 0 if none."""
    inodes = set()
    for fd in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
        except OSError:
            pass
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/{pid}/net/{name}").readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                return int(fields[1].rsplit(":", 1)[1], 16)
    return 0


if __name__ == "__main__":
    main()
