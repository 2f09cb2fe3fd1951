#!/usr/bin/env python3
"""Compares the router with nginx and haproxy as whole processes on one core each.

The simulated engine and the load generator share one core; the proxy under test has the
other core to itself. CPU is the time that the kernel accounts to the proxy's processes
(utime + stime). Each figure is the median of the rounds with its range. Only ratios within
one run are meaningful: machines differ, and their speed drifts.

  json     short non-streamed completions with token ids, 64 connections
  stream   200 paced streams, one event every 10 ms (the engine's step)
  added    time to first token at 200 streams minus that of the engine alone
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLUICE = os.path.join(ROOT, "bin", "sluice")
TICK = os.sysconf("SC_CLK_TCK")

NGINX = """
daemon off; worker_processes 1; error_log {dir}/error.log; pid {dir}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
  upstream engine {{ {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_request_buffering off; }} }}
}}
"""

HAPROXY = """
global
  maxconn 8000
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  option http-no-delay
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  http-reuse always
{servers}
"""


def free_port():
    """Returns a port that is free now, below the system's ephemeral range."""
    for _ in range(200):
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    sys.exit("no free port in 200 tries")


class Process:
    """A child process on one core; reports the CPU time of itself and its children."""

    def __init__(self, cpu, argv, first_line=False):
        self.err = tempfile.TemporaryFile()
        self.p = subprocess.Popen(
            ["taskset", "-c", str(cpu)] + argv,
            stdout=subprocess.PIPE if first_line else subprocess.DEVNULL,
            stderr=self.err,
            text=True,
            env=dict(os.environ, GOMAXPROCS="1"),
        )
        self.addr = self.p.stdout.readline().strip() if first_line else None
        if first_line and not self.addr:
            sys.exit("%s did not start: %s" % (argv[0], self.stderr()))

    def stderr(self):
        self.err.seek(0)
        return self.err.read().decode(errors="replace")[-2000:]

    def cpu(self):
        total = 0
        for pid in [self.p.pid] + children(self.p.pid):
            try:
                with open("/proc/%d/stat" % pid) as f:
                    fields = f.read().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
            except OSError:
                pass
        return total / TICK

    def rss_kib(self):
        total = 0
        for pid in [self.p.pid] + children(self.p.pid):
            try:
                with open("/proc/%d/status" % pid) as f:
                    total += next((int(l.split()[1]) for l in f if l.startswith("VmRSS")), 0)
            except OSError:
                pass
        return total

    def stop(self):
        self.p.send_signal(signal.SIGTERM)
        try:
            self.p.wait(10)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()


def children(pid):
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
            return [int(x) for x in f.read().split()]
    except OSError:
        return []


def wait_ready(addr, path, seconds=30):
    end = time.time() + seconds
    last = ""
    while time.time() < end:
        try:
            with urllib.request.urlopen("http://%s%s" % (addr, path), timeout=2) as r:
                if r.status == 200:
                    return
        except Exception as e:  # noqa: BLE001 - any failure means not ready yet
            last = str(e)
        time.sleep(0.1)
    sys.exit("%s%s is not ready: %s" % (addr, path, last))


BASELINES = set()  # addresses of the proxies that the router is compared with


def load(cpu, addr, *flags):
    """Runs the load once. If requests to a baseline fail, it reports that and runs again, up
    to three times: a failure of a baseline is not a failure of the router."""
    for _ in range(3):
        rep = load_once(cpu, addr, *flags)
        if not rep["failed"]:
            return rep
        failed = "load against %s: %d requests failed: %s" % (addr, rep["failed"], rep.get("errors"))
        if addr not in BASELINES:
            break
        print(failed + "; running again", file=sys.stderr)
    sys.exit(failed)


def load_once(cpu, addr, *flags):
    out = subprocess.run(
        ["taskset", "-c", str(cpu), SLUICE, "load", "--url", "http://" + addr, "--json", "--quiet", *flags],
        capture_output=True, text=True,
    )
    if out.returncode != 0:
        sys.exit("load failed: %s%s" % (out.stdout[-1500:], out.stderr[-1500:]))
    return json.loads(out.stdout)


JSON_LOAD = ["--stream=false", "--endpoint", "completions", "--token-ids", "--concurrency", "64", "--prompt-tokens", "64", "--output-tokens", "4"]
STREAM_LOAD = ["--endpoint", "completions", "--token-ids", "--concurrency", "200", "--prompt-tokens", "64", "--output-tokens", "100"]
TTFT_LOAD = ["--endpoint", "completions", "--token-ids", "--concurrency", "200", "--prompt-tokens", "64", "--output-tokens", "20"]


# Each function starts a proxy of one or more engines on a core and returns its name, process, address, and a
# path that answers 200 when the proxy is ready.


def nginx(start, cpu, tmp, *engines):
    port = free_port()
    d = tempfile.mkdtemp(dir=tmp)
    with open(d + "/nginx.conf", "w") as f:
        f.write(NGINX.format(dir=d, servers="".join("server %s;" % e for e in engines), port=port))
    return "nginx", start(cpu, ["nginx", "-p", d, "-c", d + "/nginx.conf"]), "127.0.0.1:%d" % port, "/health"


def haproxy(start, cpu, tmp, *engines):
    port = free_port()
    d = tempfile.mkdtemp(dir=tmp)
    with open(d + "/haproxy.cfg", "w") as f:
        f.write(HAPROXY.format(servers="\n".join("  server engine%d %s" % e for e in enumerate(engines)), port=port))
    return "haproxy", start(cpu, ["haproxy", "-f", d + "/haproxy.cfg"]), "127.0.0.1:%d" % port, "/health"


def sluice(start, cpu, name, engine, *flags, binary=SLUICE):
    p = start(cpu, [binary, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--log-level", "error", "--engine", "http://%s,kv_events=off" % engine, *flags], first_line=True)
    return name, p, p.addr, "/readyz"


def med(values, digits=1):
    return "%.*f [%.*f–%.*f]" % (digits, statistics.median(values), digits, min(values), digits, max(values))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement, in seconds")
    a = ap.parse_args()
    if not os.path.exists(SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    if os.cpu_count() < 2:
        sys.exit("this needs two cores: one for the proxy, one for engine and load")
    for tool in ("nginx", "haproxy", "taskset"):
        if not shutil.which(tool):
            sys.exit("%s is not installed; run: scripts/bootstrap.sh --bench" % tool)

    tmp = tempfile.mkdtemp(prefix="sluice-bench-")
    procs = []

    def start(*args, **kw):
        p = Process(*args, **kw)
        procs.append(p)
        return p

    try:
        # Prefill and transfer take no time; only the step remains, 10 ms between events.
        sim = ["sim", "--kv-events", "off", "--records", "-1", "--max-num-seqs", "4096", "--cost-admit", "-1ns", "--cost-seq", "-1ns", "--cost-prefill", "-1ns", "--cost-transfer", "-1ns", "--cost-handshake", "-1ns", "--blocks", "65536"]
        paced = start(0, [SLUICE, *sim, "--cost-step", "10ms"], first_line=True)
        fast = start(0, [SLUICE, *sim, "--speed", "inf"], first_line=True)
        prefill = start(0, [SLUICE, *sim, "--role", "prefill", "--speed", "inf"], first_line=True)
        pinf = start(0, [SLUICE, *sim, "--role", "decode", "--cost-step", "10ms"], first_line=True)
        pjson = start(0, [SLUICE, *sim, "--role", "decode", "--speed", "inf"], first_line=True)
        # The prefill leg sent directly to its engine; the baseline of P/D is the sum of both legs.
        for s in (paced, fast, prefill, pinf, pjson):
            wait_ready(s.addr, "/health")

        rows = {}
        seconds = "%.1fs" % a.seconds

        def proxies(engine):
            yield nginx(start, 1, tmp, engine)
            yield haproxy(start, 1, tmp, engine)
            yield sluice(start, 1, "sluice", engine)

        def pd(decode):
            p = start(1, [SLUICE, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--log-level", "error", "--prefill", "http://%s,kv_events=off" % prefill.addr, "--decode", "http://%s,kv_events=off" % decode], first_line=True)
            return "sluice P/D", p, p.addr, "/readyz"

        def each(engine, decode):
            got = list(proxies(engine)) + [pd(decode)]
            for _, _, addr, path in got:
                wait_ready(addr, path)
            return got

        json_side = each(fast.addr, pjson.addr)
        stream_side = each(paced.addr, pinf.addr)
        for round_ in range(a.rounds):
            print("round %d of %d" % (round_ + 1, a.rounds), file=sys.stderr)
            for name, p, addr, _ in json_side:
                load(0, addr, *JSON_LOAD, "--duration", "0.5s")
                before = p.cpu()
                rep = load(0, addr, *JSON_LOAD, "--duration", seconds)
                rows.setdefault(name, {}).setdefault("json", []).append((p.cpu() - before) / rep["ok"] * 1e6)
                rows[name].setdefault("rps", []).append(rep["requests_per_second"])
            direct = load(0, paced.addr, *TTFT_LOAD, "--duration", seconds)
            for name, p, addr, _ in stream_side:
                load(0, addr, *STREAM_LOAD, "--duration", "0.5s")
                before = p.cpu()
                rep = load(0, addr, *STREAM_LOAD, "--duration", seconds)
                chunks = rep["chunks_per_second"] * rep["seconds"]
                rows[name].setdefault("chunk", []).append((p.cpu() - before) / chunks * 1e6)
                rep = load(0, addr, *TTFT_LOAD, "--duration", seconds)
                for q in ("p50", "p99"):
                    rows[name].setdefault(q, []).append((rep["ttft"][q + "_ms"] - direct["ttft"][q + "_ms"]) * 1000)
                rows[name]["rss"] = p.rss_kib()

        print("\nCPU of the proxy process on its own core; median [range] of %d rounds of %s.\n" % (a.rounds, seconds))
        print("| proxy | JSON µs CPU/request | ratio to haproxy | requests/s | stream µs CPU/chunk | ratio to haproxy | added TTFT p50 µs | added TTFT p99 µs | RSS MiB |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        base = rows["haproxy"]
        for name, r in rows.items():
            ratio = lambda k: statistics.median(x / y for x, y in zip(r[k], base[k]))  # noqa: E731
            print("| %s | %s | %.2f | %s | %s | %.2f | %s | %s | %.0f |" % (
                name, med(r["json"]), ratio("json"), med(r["rps"], 0), med(r["chunk"]), ratio("chunk"), med(r["p50"], 0), med(r["p99"], 0), r["rss"] / 1024))
        print("\nAdded TTFT is the difference to the engine alone at the same 200 streams. P/D has an additional prefill leg, so its added time includes one more engine round trip.")
    finally:
        for p in procs:
            p.stop()
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    main()
