#!/usr/bin/env python3
"""Offers more load than a simulated fleet can serve, through Sluice and other routers.

    make overload            (40 minutes on two quiet cores)
    scripts/overload.py --quick
    scripts/overload.py sessions

Parts, in this order; the results of each are kept, so that one can be repeated alone:

  capacity     requests per second of the fleet with full batches; loads are shares of it
  main         loads by methods: Sluice without a queue, with a FIFO queue, and with classes, tenants and
               targets; haproxy with maxconn; sglang-router
  light        60 and 90 % load with the default configuration and with admission.mode off: the same first
               token and CPU
  classes      the highest class alone, and at the highest load with preemption
  tenants      a tenant that offers its share and ten times as much, and the other tenants' latency
  fairness     tenants with different loads, all above their share
  sessions     64 sessions of agents whose KV does not fit, with and without the limit of active ones;
               not part of a run without arguments

All methods get the same requests at the same times: Poisson arrivals with the seed of the round. Latency
counts from the time at which a request was due. The load continues after the measured time until every
answer that could still be within its targets has ended; the rest is cut off and counts as unanswered.
"""

import argparse
import hashlib
import http.client
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PARTS = ["capacity", "light", "main", "classes", "tenants", "fairness"]
METHODS = {"none": "Sluice, no queue", "fifo": "Sluice, FIFO", "fair": "Sluice, classes and tenants", "haproxy": "haproxy, maxconn", "sglang": "sglang-router"}
PLAIN = {"off": "admission.mode: off", "default": "default configuration"}  # of light, whose requests have no class, tenant and target
COLOURS = {"none": "#8250df", "fifo": "#bf8700", "fair": "#1f6feb", "haproxy": "#1a7f37", "sglang": "#cf222e"}
SGLANG_ROUTER = "0.3.2"

# The engines: 4 ranks with batches of 16.
ENGINES, BATCH, BLOCKS = 4, 16, 2500
SIM = ["--max-num-seqs", str(BATCH), "--max-num-batched-tokens", "1024", "--blocks", str(BLOCKS),
       "--cost-step", "10ms", "--cost-seq", "250us", "--cost-prefill", "60us", "--records", "-1"]
# sglang-router accepts prompts as text only, so prompts are chats, of words of about three tokens.
PROMPT, OUTPUT = 200, 32  # mean words and tokens; half of a prompt is one of 8 prefixes of its source
TTFT, TPOT = 1.5, 0.05  # targets, in seconds
ENGINE_QUEUE = 0.2  # admission.engine_queue, in seconds
QUEUE_WAIT = 1  # longest wait in a queue that knows no targets, so that what it serves can be within them
LIGHT = [60, 90]  # loads, in percent, at which the queue must make no difference
LIGHT_ROUNDS = 7  # one request in a hundred determines the p99 of a round
TENANT_ROUNDS = 7  # so do three of the requests of a tenant
QUIET = 0.20  # load of each tenant that stays below its share, a quarter
MAX_SEND_DELAY = 100  # ms; a load generator that is later than this does not offer the load
HIGH = 0.30  # load of the highest class, as a share of capacity

SLUICE = """
listen: 127.0.0.1:{port}
log: {{level: error}}
admin: {{listen: "off"}}
{admission}
workers:
"""

ADMISSION = """admission:
  mode: {mode}
  engine_queue: {queue}ms
  max_wait: {wait}ms
  trusted: [any]
{preemption}
  default_class: normal
  classes: [{{name: high}}, {{name: normal}}, {{name: low}}]
{more}
"""

# The highest class is first in the queue.
HAPROXY = """
global
  maxconn 8000
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  timeout queue {queue}ms
  option http-no-delay
frontend f
  bind 127.0.0.1:{port}
  http-request set-priority-class int(-10) if {{ req.hdr(x-sluice-priority) -m str high }}
  http-request set-priority-class int(10) if {{ req.hdr(x-sluice-priority) -m str low }}
  default_backend b
backend b
  balance leastconn
  http-reuse always
  option httpchk GET /health
{servers}
"""


def say(text):
    print(time.strftime("%H:%M:%S ") + text, flush=True)


def sglang_router():
    """Returns the program, installed into a virtual environment in the cache at the first use."""
    home = os.path.expanduser("~/.cache/sluice/compare/sglang-router-" + SGLANG_ROUTER)
    program = os.path.join(home, "bin", "sglang-router")
    if not os.path.exists(program):
        say("installing sglang-router " + SGLANG_ROUTER)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([os.path.join(home, "bin", "pip"), "-q", "install", "sglang-router==" + SGLANG_ROUTER], check=True)
    return program


def has_preemption(o):
    """Reports whether the build can suspend streams of lower classes."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        f.write("admission: {preemption: true}\nworkers: [{url: 'http://127.0.0.1:1', role: aggregated}]\n")
        f.flush()
        return subprocess.run([o.bin, "check", "--config", f.name], capture_output=True).returncode == 0


def cpu_box():
    with open("/proc/stat") as f:
        v = [int(x) for x in f.readline().split()[1:]]
    return sum(v[:8]) - v[3] - v[4], sum(v[:8])


def free_ports(first, n):
    """Returns the first of n consecutive ports that are free now, below the ephemeral range."""
    for base in range(first, 32_000, 50):
        sockets = []
        try:
            for p in range(base, base + n):
                s = socket.socket()
                sockets.append(s)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind(("127.0.0.1", p))
            return base
        except OSError:
            pass
        finally:
            for s in sockets:
                s.close()
    sys.exit(f"no {n} consecutive ports are free from {first} on; another first one: --port")


class Fleet:
    """The engines and the router of one cell, in new processes."""

    def __init__(self, o, method, preemption=False, sim=None, more=""):
        self.o, self.procs, self.dir = o, [], tempfile.TemporaryDirectory(prefix="sluice-overload-")
        try:
            self.begin(method, preemption, sim or SIM, more)
        except BaseException:
            self.close()
            raise

    def begin(self, method, preemption, sim, more):
        base = free_ports(self.o.port, 10 * ENGINES + 2)
        ports = [base + 10 * i for i in range(ENGINES)]
        port = base + 10 * ENGINES
        for p in ports:
            self.start([self.o.bin, "sim", "--listen", f"127.0.0.1:{p}", "--kv-events", f"tcp://127.0.0.1:{p + 1}", "--kv-replay", f"tcp://127.0.0.1:{p + 2}", *sim])
        self.url = f"http://127.0.0.1:{port}"
        for p in ports:
            self.wait(f"http://127.0.0.1:{p}/health")
        if method == "haproxy":
            servers = "\n".join(f"  server e{i} 127.0.0.1:{p} maxconn {BATCH} check" for i, p in enumerate(ports))
            path = self.write("haproxy.cfg", HAPROXY.format(port=port, servers=servers, queue=int(QUEUE_WAIT * 1000)))
            self.start(["haproxy", "-f", path])
            self.wait(self.url + "/health")
        elif method == "sglang":
            self.start([sglang_router(), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *[f"http://127.0.0.1:{p}" for p in ports],
                        "--policy", "cache_aware", "--max-concurrent-requests", str(BATCH * ENGINES), "--queue-size", "1000", "--queue-timeout-secs", str(QUEUE_WAIT), "--rate-limit-tokens-per-second", "1",
                        "--disable-retries", "--disable-circuit-breaker", "--log-level", "error", "--prometheus-port", str(port + 1)])
            self.wait(self.url + "/health")
            self.wait_for_answers()
        else:
            if method in PLAIN:
                admission = {"off": "admission: {mode: 'off'}", "default": ""}[method]
            else:
                mode = {"none": "off"}.get(method, method)
                # Like haproxy's, the FIFO queue knows no targets; a bound of the wait serves those in time that it serves.
                wait = QUEUE_WAIT if method == "fifo" else 30
                admission = ADMISSION.format(mode=mode, queue=int(ENGINE_QUEUE * 1000), wait=int(wait * 1000), preemption="  preemption: true" if preemption else "", more=more)
            path = self.write("sluice.yaml", SLUICE.format(port=port, admission=admission) + "".join(f"  - {{url: 'http://127.0.0.1:{p}', role: aggregated}}\n" for p in ports))
            self.start([self.o.bin, "serve", "--config", path])
            self.wait(self.url + "/metrics", lambda text: text.count('state="ready"') == ENGINES and
                      sum(line.endswith(" 1") for line in text.splitlines() if line.startswith("sluice_rank_feed_live{")) == ENGINES)

    def write(self, name, text):
        path = os.path.join(self.dir.name, name)
        with open(path, "w") as f:
            f.write(text)
        return path

    def start(self, args):
        with open(os.path.join(self.dir.name, f"{len(self.procs)}.log"), "w") as log:
            self.procs.append(subprocess.Popen(args, stdout=log, stderr=log))

    def router_cpu(self):
        """Returns the CPU time that the router has used, in seconds."""
        with open(f"/proc/{self.procs[-1].pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def logs(self):
        text = ""
        for name in sorted(os.listdir(self.dir.name)):
            if name.endswith(".log"):
                with open(os.path.join(self.dir.name, name), errors="replace") as f:
                    text += f.read()[-800:]
        return text

    def wait(self, url, ready=lambda text: True, seconds=60):
        end = time.time() + seconds
        while True:
            try:
                with urllib.request.urlopen(url, timeout=2) as r:
                    if r.status == 200 and ready(r.read().decode()):
                        return
            except OSError:
                pass
            if any(p.poll() is not None for p in self.procs):
                raise RuntimeError("a process ended:\n" + self.logs())
            if time.time() > end:
                raise RuntimeError(f"{url} was not ready in {seconds} s:\n" + self.logs())
            time.sleep(0.1)

    def wait_for_answers(self):
        """sglang-router is healthy before it has workers: waits until a request succeeds."""
        body = json.dumps({"model": "sim", "prompt": "a word", "max_tokens": 1}).encode()
        end = time.time() + 60
        while True:
            try:
                q = urllib.request.Request(self.url + "/v1/completions", body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(q, timeout=5):
                    return
            except OSError:
                if time.time() > end:
                    raise RuntimeError("sglang-router does not serve:\n" + self.logs())
                time.sleep(0.2)

    def load(self, *args):
        args = [self.o.bin, "load", "--url", self.url, "--json", "--quiet", *args]
        box, all_ = cpu_box()
        used = self.router_cpu()
        probe = Probe(self.url)
        out = subprocess.run(args, capture_output=True, text=True)
        probed = probe.end()
        if not out.stdout:
            raise RuntimeError("sluice load: " + out.stderr[-2000:] + self.logs())
        rep = json.loads(out.stdout)
        box2, all2 = cpu_box()
        rep["box"] = (box2 - box) / max(1, all2 - all_)
        rep["router_cpu"] = self.router_cpu() - used
        rep["probe"] = probed
        return rep

    def close(self):
        for p in reversed(self.procs):
            p.send_signal(signal.SIGTERM)
        for p in self.procs:
            try:
                p.wait(5)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        self.dir.cleanup()


class Probe(threading.Thread):
    """Asks the router for its version while a load runs. What such a request takes, which waits for nothing, is
    what the machine adds to every time."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.host, self.stop, self.times = url.removeprefix("http://"), threading.Event(), []
        self.start()

    def run(self):
        try:
            c = http.client.HTTPConnection(self.host, timeout=5)
            while not self.stop.wait(0.02):
                began = time.perf_counter()
                c.request("GET", "/health")
                c.getresponse().read()
                self.times.append(1000 * (time.perf_counter() - began))
        except (OSError, http.client.HTTPException):
            pass

    def end(self):
        self.stop.set()
        self.join()
        times = sorted(self.times)
        return {"p50_ms": times[len(times) // 2], "p99_ms": times[len(times) * 99 // 100]} if times else None


class Results:
    """The reports of all cells, in a file, so that a part can be repeated or an ended run continued."""

    def __init__(self, path, settings, build):
        self.path, self.build = path, build  # of Sluice, for the cells that are measured
        self.data = {"settings": settings, "cells": {}}
        if os.path.exists(path):
            with open(path) as f:
                old = json.load(f)
            if old["settings"] == settings:
                self.data = old
            else:
                say(f"the results in {path} are of other settings, and are dropped")

    def drop(self, parts):
        self.data["cells"] = {k: v for k, v in self.data["cells"].items() if k.split("/")[0] not in parts}

    def put(self, key, report):
        report["build"] = self.build
        self.data["cells"][key] = report
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path + ".new", "w") as f:
            json.dump(self.data, f, indent=1)
        os.replace(self.path + ".new", self.path)

    def has(self, key):
        return key in self.data["cells"]

    def rounds(self, key):
        """Returns the reports of a cell, one for each round measured."""
        return [v for k, v in sorted(self.data["cells"].items()) if k.rsplit("/", 1)[0] == key]

    def pairs(self, key, other):
        """Returns the reports of two cells for each round in which both were measured: they have the same arrivals."""
        cells = self.data["cells"]
        numbers = sorted(k.rsplit("/", 1)[1] for k in cells if k.rsplit("/", 1)[0] == key)
        return [(cells[f"{key}/{n}"], cells[f"{other}/{n}"]) for n in numbers if f"{other}/{n}" in cells]

    def builds(self):
        """Returns, by what was measured, the builds of Sluice of its cells. Those of haproxy and sglang-router have its engines and load."""
        found = {}
        for key, rep in self.data["cells"].items():
            parts = key.split("/")
            what = "capacity" if parts[0] == "capacity" else {**METHODS, **PLAIN}[next((p for p in parts if p in METHODS or p in PLAIN), "fair")]
            found.setdefault(what, set()).add(rep.get("build", "unknown"))
        return found


def source(rate, targets=True, **keys):
    target = [f"ttft={int(TTFT * 1000)}ms", f"tpot={int(TPOT * 1000)}ms"] if targets else []
    return ["--source", ",".join([f"rate={rate:.3f}", "spread=0.5"] + target + [f"{k}={v}" for k, v in keys.items()])]


def shares(load):
    """Returns the tenants of a load and what each offers, as a share of capacity. The highest class
    offers the same at each load, and the others the rest."""
    rest = load / 100 - HIGH
    return [("interactive", HIGH), *[(f"team-{i}", rest * 2 / 9) for i in (1, 2, 3)], ("batch", rest / 3)]


def mix(capacity, load):
    """The sources of a load."""
    out = []
    for tenant, share in shares(load):
        out += source(share * capacity, tenant=tenant, **{"class": {"interactive": "high", "batch": "low"}.get(tenant, "normal")})
    return out


def plain(capacity, load):
    """The sources of mix as clients send them that know nothing of classes, tenants and targets."""
    out = []
    for name, share in shares(load):
        out += source(share * capacity, targets=False, name=name)
    return out


def tenants(capacity, factor):
    """Three tenants below their share of capacity, and one that offers factor times its share, a
    quarter."""
    out = []
    for i in range(3):
        out += source(QUIET * capacity, tenant=f"tenant-{i + 1}")
    return out + source(factor / 4 * capacity, tenant="greedy")


def backlogged(capacity):
    """Four tenants with more than their share. They have no targets, so that their queues stay full."""
    out = []
    for i, share in enumerate([0.5, 0.75, 1.0, 1.5]):
        out += source(share * capacity, targets=False, tenant=f"tenant-{i + 1}")
    return out


def common(o, seed):
    return ["--poisson", "--seed", str(seed), "--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT)]


def timed(o, factor=1):
    return ["--warmup", f"{o.warmup}s", "--duration", f"{factor * o.seconds}s", "--cooldown", f"{o.cooldown}s"]


class Bench:
    def __init__(self, o, results):
        self.o, self.r, self.began = o, results, time.time()

    def cell(self, key, number, method, sources, preemption=False, longer=1):
        """Measures a cell of one round, unless it is there."""
        key = f"{key}/{number}"
        if self.r.has(key):
            return
        try:
            for attempt in range(3):
                rep = self.measure(method, *common(self.o, self.o.seed + number), *timed(self.o, longer), *sources, preemption=preemption)
                if rep["send_delay"]["p99_ms"] <= MAX_SEND_DELAY:
                    break
                say(f"{key}: requests were sent up to {rep['send_delay']['p99_ms']:,.0f} ms late (p99), because something else uses this machine" + ("; again" if attempt < 2 else ""))
        except RuntimeError as e:
            say(f"{key} FAILED, and is left out: {e}")
            return
        rep.pop("requests_by_worker", None)
        self.r.put(key, rep)
        g = rep["overall"]
        say(f"{key:28} within targets {g['goodput_per_second']:6.1f}/s  first token p50 {g['ttft']['p50_ms']:6,.0f} ms  p99 {g['ttft']['p99_ms']:6,.0f} ms  "
            f"refused {g['refused']:5}  unanswered {g['unanswered']:5}  failed {g['failed']:4}  machine CPU {100 * rep['box']:3.0f} %")

    def measure(self, method, *args, **fleet):
        """Runs a load against a new fleet; again if a process failed, such as by a port that was taken
        meanwhile."""
        for attempt in range(3):
            try:
                f = Fleet(self.o, method, **fleet)
                try:
                    return f.load(*args)
                finally:
                    f.close()
            except RuntimeError as e:
                if attempt == 2:
                    raise
                say(f"trying again: {e}")

    def capacity(self):
        if not self.r.has("capacity/0"):
            # Twice the batches, so that none is ever short of a request, of the tenants in main: their number
            # of prefixes decides how much is found in the cache.
            sources = []
            for tenant, share in shares(100):
                sources += ["--source", f"users={max(1, round(2 * BATCH * ENGINES * share))},tenant={tenant},spread=0.5"]
            rep = self.measure("none", *common(self.o, self.o.seed), *timed(self.o), *sources)
            rep["rate"] = rep["overall"]["served_per_second"]
            self.r.put("capacity/0", rep)
        rate = self.r.data["cells"]["capacity/0"]["rate"]
        say(f"capacity {rate:.1f} requests per second; time per output token p50 {self.r.data['cells']['capacity/0']['overall']['tpot']['p50_ms']:.1f} ms")
        return rate

    def ordered(self, items, number):
        """Every other round backwards: who comes first may find another machine than who comes last."""
        return items if number % 2 == 0 else list(reversed(items))

    def light(self, capacity):
        for number in range(self.o.rounds if self.o.quick else LIGHT_ROUNDS):
            for load in LIGHT:
                for method in self.ordered(list(PLAIN), number):
                    self.cell(f"light/{load}/{method}", number, method, plain(capacity, load))

    def main(self, capacity):
        for number in range(self.o.rounds):
            for load in self.o.loads:
                for method in self.ordered(self.o.methods, number):
                    if number >= 2 and method not in ("none", "fair"):
                        continue  # two rounds show the others
                    self.cell(f"main/{load}/{method}", number, method, mix(capacity, load))

    def classes(self, capacity):
        top = max(self.o.loads)
        preempts = has_preemption(self.o)
        if not preempts:
            say("this build has no admission.preemption; without those cells")
        for number in range(self.o.rounds):
            self.cell("classes/alone", number, "fair", source(HIGH * capacity, tenant="interactive", **{"class": "high"}))
            if preempts:
                self.cell("classes/preemption", number, "fair", mix(capacity, top), preemption=True)

    def tenants(self, capacity):
        for number in range(self.o.rounds if self.o.quick else TENANT_ROUNDS):
            for method in ["fair"] + ["fifo"] * (number == 0 and not self.o.quick):
                for factor in (1, 10):
                    # A p99 of the few requests of one tenant needs more of them.
                    self.cell(f"tenants/{factor}/{method}", number, method, tenants(capacity, factor), longer=2)

    def fairness(self, capacity):
        for number in range(self.o.rounds):
            for method in ["fair"] + ["fifo"] * (number == 0 and not self.o.quick):
                self.cell(f"fairness/{method}", number, method, backlogged(capacity))

    def sessions(self):
        n = self.o.agents
        low, high = self.o.turns
        speed = self.o.speed
        grow, output, first = 200, 40, 1000
        working_set = n * (first + (low + high) / 4 * (grow + output))  # in the middle of a mean session
        blocks = max(int(working_set / 3 / ENGINES / 16), (first + high * (grow + output)) * 5 // 4 // 16)
        sim = ["--max-num-seqs", str(BATCH), "--max-num-batched-tokens", "2048", "--blocks", str(blocks), "--cost-step", "8ms", "--cost-seq", "100us",
               "--cost-prefill", "100us", "--records", "-1", "--speed", str(speed)]
        for number in range(self.o.rounds if self.o.session_rounds is None else self.o.session_rounds):
            for name, limit in self.ordered([("without", False), ("with", True)], number):
                key = f"sessions/{name}/{number}"
                if self.r.has(key):
                    continue
                rep = self.measure("fair", "--endpoint", "completions", "--token-ids", "--seed", str(self.o.seed + number), "--duration", "1h", "--timeout", "40m", "--prompt-tokens", str(first), "--output-tokens", str(output), "--source",
                                   f"name=agent,agents={n},turns={low}-{high},grow={grow},spread=0.3,pause={500 / speed:.0f}ms,start={2000 / speed:.0f}ms",
                                   sim=sim, more=f"sessions: {{limit_active: {str(limit).lower()}, hold: 10s, max_wait: 30m}}")
                rep["working_set"], rep["kv"] = working_set, (blocks - 1) * 16 * ENGINES
                rep["agents"], rep["turns"], rep["speed"] = n, [low, high], speed
                self.r.put(key, rep)
                s = rep["sessions"]
                say(f"{key:28} {s['finished']} sessions ended, {s['unfinished']} did not; all after {rep['seconds']:.0f} s, p50 {s['time']['p50_ms'] / 1000:.0f} s; "
                    f"cached {100 * rep['cached_tokens'] / max(1, rep['prompt_tokens']):.0f} %; machine CPU {100 * rep['box']:.0f} %")


# The page.


def med(values, digits=0):
    """Returns the median with the range, as text."""
    values = [v for v in values if v is not None]
    if not values:
        return "–"
    text = f"{statistics.median(values):,.{digits}f}"
    if len(values) > 1:
        text += f" [{min(values):,.{digits}f}–{max(values):,.{digits}f}]"
    return text


def median(values):
    return statistics.median(values) if values else None


def goodput(rep):
    return rep["overall"]["goodput_per_second"]


def high_p99(rep):
    return rep["by_class"]["high"]["ttft"]["p99_ms"]


def main_rows(o, r):
    rows = []
    for load in o.loads:
        for m in o.methods:
            reps = r.rounds(f"main/{load}/{m}")
            if not reps:
                continue
            share = lambda key: med([100 * rep["overall"][key] / max(1, rep["overall"]["requests"]) for rep in reps])
            rows.append(f"| {load} % | {METHODS[m]} | {med([goodput(x) for x in reps], 1)} | {med([x['overall']['ttft']['p50_ms'] for x in reps])} | "
                        f"{med([x['overall']['ttft']['p99_ms'] for x in reps])} | {med([high_p99(x) for x in reps])} | {med([x['overall']['tpot']['p99_ms'] for x in reps], 1)} | "
                        f"{med([x['output_tokens_per_second'] for x in reps])} | {share('refused')} | {share('unanswered')} | {share('failed')} | "
                        f"{med([x['overall']['refusal']['p99_ms'] for x in reps if x['overall']['refused']], 1)} | {med([100 * x['box'] for x in reps])} |")
    return rows


def ratios(o, r, method):
    """Returns, for each tenant but the greedy one, by how much its p99 rose, in medians of the rounds."""
    before, after = r.rounds(f"tenants/1/{method}"), r.rounds(f"tenants/10/{method}")
    if not before or not after:
        return {}
    p99 = lambda reps, t: median([x["by_tenant"][t]["ttft"]["p99_ms"] for x in reps])
    return {t: (p99(before, t), p99(after, t)) for t in before[0]["by_tenant"] if t != "greedy"}


def cpu_ms(rep):
    """Returns the router's CPU time for a request, in ms."""
    return 1000 * rep["router_cpu"] / max(1, rep["overall"]["requests"] * (rep["seconds"] / rep["window_seconds"]))


def light_rows(r):
    rows = []
    for load in LIGHT:
        for m in PLAIN:
            reps = r.rounds(f"light/{load}/{m}")
            if reps:
                rows.append(f"| {load} % | {PLAIN[m]} | {med([x['overall']['ttft']['p50_ms'] for x in reps], 1)} | {med([x['overall']['ttft']['p99_ms'] for x in reps], 1)} | "
                            f"{med([x['overall']['tpot']['p50_ms'] for x in reps], 1)} | {med([cpu_ms(x) for x in reps], 3)} |")
    return rows


def goals(o, r):
    """Returns rows: the goal, what was measured, and whether it is met."""
    top = max(o.loads)
    rows = []

    def row(goal, measured, met):
        rows.append(f"| {goal} | {measured} | {'–' if met is None else 'yes' if met else '**no**'} |")

    best = max(((median([goodput(x) for x in r.rounds(f"main/{l}/{m}")]), l, m) for l in o.loads for m in o.methods if r.rounds(f"main/{l}/{m}")), default=None)
    own = median([goodput(x) for x in r.rounds(f"main/{top}/fair")])
    if best and own is not None:
        row(f"goodput at {top} % load ≥ 95 % of the best of any method at any load",
            f"{own:.1f}/s, {100 * own / max(best[0], 1e-9):.0f} % of {best[0]:.1f}/s ({METHODS[best[2]]} at {best[1]} %)", own >= 0.95 * best[0])
    alone = median([high_p99(x) for x in r.rounds("classes/alone")])
    if alone is not None:
        bound = 1.2 * alone + ENGINE_QUEUE * 1000
        for name, key in (("without preemption", f"main/{top}/fair"), ("with preemption", "classes/preemption")):
            values = [high_p99(x) for x in r.rounds(key)]
            if not values and key == "classes/preemption":
                rows.append("| the same with preemption | not measured | – |")
            if values:
                row(f"first token p99 of the highest class at {top} %, {name}, ≤ 1.2 × that alone + `engine_queue`",
                    f"{med(values)} ms; alone {alone:,.0f} ms, so at most {bound:,.0f} ms", median(values) <= bound)
    values = ratios(o, r, "fair")
    if values:
        worst = lambda v: max(v.values(), key=lambda x: x[1] / max(x[0], 1e-9))
        own, more = worst(values), ratios(o, r, "fifo")
        text = f"× {own[1] / max(own[0], 1e-9):.2f}: {own[0]:,.0f} to {own[1]:,.0f} ms, of the tenant that it rose most for"
        if more:
            text += " (FIFO: × %.2f)" % (worst(more)[1] / max(worst(more)[0], 1e-9))
        row("a tenant that offers 10 × its share raises nobody else's first token p99 by more than 25 %", text, own[1] <= 1.25 * own[0])
    values = [x["fairness"] for x in r.rounds("fairness/fair")]
    if values:
        more = [x["fairness"] for x in r.rounds("fairness/fifo")]
        row("Jain's index over the tokens computed for backlogged tenants ≥ 0.98", med(values, 3) + (f" (FIFO: {med(more, 3)})" if more else ""), median(values) >= 0.98)
    reps = [x for x in r.rounds(f"main/{top}/fair") if x["overall"]["refused"]]
    if reps:
        values = [x["overall"]["refusal"]["p99_ms"] for x in reps]
        machine = [x["probe"]["p99_ms"] for x in reps if x.get("probe")]
        waited = [100 * x["overall"].get("refused_after_wait", 0) / x["overall"]["refused"] for x in reps]
        row("a refusal is sent within 5 ms of the request", f"p99 {med(values, 1)} ms, p50 {med([x['overall']['refusal']['p50_ms'] for x in reps], 1)} ms; a request that waits for nothing takes p99 {med(machine, 1)} ms "
            f"on this machine then; {med(waited, 1)} % were refused after a wait, and are not in this", median(values) <= 5)
    late = sorted(k for k, v in r.data["cells"].items() if v["send_delay"]["p99_ms"] > MAX_SEND_DELAY)
    if late:
        rows.append(f"| {len(late)} cells were measured on a machine that something else used, and say nothing | {', '.join(late)} | – |")
    for load in LIGHT:
        rounds = r.pairs(f"light/{load}/off", f"light/{load}/default")
        if not rounds:
            continue
        text, met = [], True
        for name, value, digits, least in (("first token p50", lambda x: x["overall"]["ttft"]["p50_ms"], 1, 1), ("p99", lambda x: x["overall"]["ttft"]["p99_ms"], 1, 5), ("CPU per request", cpu_ms, 3, 0)):
            a, b = [value(x) for x, _ in rounds], [value(x) for _, x in rounds]
            differences = [y - x for x, y in zip(a, b)]
            text.append(f"{name} {med(a, digits)} and {med(b, digits)} ms, in a round {med(differences, digits)} more")
            # Equal: in the median round, with the same arrivals, the difference is less than a twentieth or than least.
            met = met and median(differences) <= max(0.05 * median(a), least)
        row(f"at {load} % load the queue, which is on by default, makes no difference: without it and with it", "; ".join(text), met)
    return rows


def session_rows(r):
    rows = []
    for name in ("without", "with"):
        reps = r.rounds(f"sessions/{name}")
        if reps:
            rows.append(f"| {name} | {med([100 * x['cached_tokens'] / max(1, x['prompt_tokens']) for x in reps])} % | {med([x['seconds'] for x in reps])} | "
                        f"{med([x['sessions']['time']['p50_ms'] / 1000 for x in reps])} | {med([x['sessions']['time']['max_ms'] / 1000 for x in reps])} | "
                        f"{med([x['overall']['ttft']['p50_ms'] for x in reps])} | {med([x['overall']['ttft']['p99_ms'] for x in reps])} | "
                        f"{med([x['output_tokens_per_second'] for x in reps])} | {med([x['sessions']['unfinished'] for x in reps])} |")
    return rows


def svg(o, r, path):
    """Draws goodput, the first token p99 of the highest class, and output tokens, by load."""
    w, h, left, top = 320, 230, 56, 30
    plots = [("answers within targets, per second", goodput, False), ("first token p99 of the highest class (ms)", high_p99, True), ("output tokens per second", lambda x: x["output_tokens_per_second"], False)]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * w + 10} {h + 44}" font-family="sans-serif" font-size="11">', f'<rect width="{3 * w + 10}" height="{h + 44}" fill="white"/>']
    for k, (title, value, logarithmic) in enumerate(plots):
        cells = {(m, l): [value(x) for x in r.rounds(f"main/{l}/{m}")] for m in o.methods for l in o.loads}
        every = [v for c in cells.values() for v in c if v > 0]
        if not every:
            continue
        x0, x1, y0, y1 = k * w + left, (k + 1) * w - 12, h - 10, top
        if logarithmic:
            lo, hi = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)) + 1e-9)
            ticks = [10**t for t in range(lo, hi + 1)]
            y = lambda v: y0 - (math.log10(max(v, 10**lo)) - lo) / max(1, hi - lo) * (y0 - y1)
        else:
            step = 10 ** math.floor(math.log10(max(every)))
            step = next(s for s in (step / 5, step / 2, step, 2 * step) if max(every) / s <= 6)
            ticks = [i * step for i in range(math.ceil(max(every) / step) + 1)]
            y = lambda v: y0 - v / ticks[-1] * (y0 - y1)
        x = lambda load: x0 + 10 + (load - min(o.loads)) / max(1, max(o.loads) - min(o.loads)) * (x1 - x0 - 20)
        out.append(f'<text x="{x0}" y="16" font-weight="bold">{title}</text>')
        for t in ticks:
            out.append(f'<line x1="{x0}" x2="{x1}" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="#ddd"/><text x="{x0 - 5}" y="{y(t) + 4:.1f}" text-anchor="end">{t:,g}</text>')
        for load in o.loads:
            out.append(f'<text x="{x(load):.1f}" y="{y0 + 16}" text-anchor="middle">{load} %</text>')
        for m in o.methods:
            points = [(x(l), cells[m, l]) for l in o.loads if cells[m, l]]
            line = " ".join(f"{a:.1f},{y(statistics.median(v)):.1f}" for a, v in points)
            out.append(f'<polyline fill="none" stroke="{COLOURS[m]}" stroke-width="2" points="{line}"/>')
            for a, v in points:
                out.append(f'<line x1="{a:.1f}" x2="{a:.1f}" y1="{y(min(v)):.1f}" y2="{y(max(v)):.1f}" stroke="{COLOURS[m]}"/>'
                           f'<circle cx="{a:.1f}" cy="{y(statistics.median(v)):.1f}" r="3" fill="{COLOURS[m]}"/>')
    for i, m in enumerate(o.methods):
        out.append(f'<rect x="{20 + i * 185}" y="{h + 24}" width="12" height="4" fill="{COLOURS[m]}"/><text x="{38 + i * 185}" y="{h + 30}">{METHODS[m]}</text>')
    out.append("</svg>\n")
    with open(path, "w") as f:
        f.write("\n".join(out))


def first_line(*args):
    try:
        return subprocess.run(args, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return "not installed"


def sluice_build(o):
    return first_line(o.bin, "version").removeprefix("sluice ")


def versions(o):
    out = []
    if "haproxy" in o.methods:
        out.append(first_line("haproxy", "-v").split(" - ")[0])
    if "sglang" in o.methods:
        out.append("sglang-router " + SGLANG_ROUTER)
    return ", ".join(out)


def builds_text(r):
    """Says of which builds of Sluice the figures are."""
    found = r.builds()
    if len(set.union(set(), *found.values())) == 1:
        return "All figures are of one build of Sluice: " + found.popitem()[1].pop() + "."
    return ("**The figures are of different builds of Sluice, measured at different times**, so small differences between these rows say nothing: "
            + "; ".join(f"{what}: {', '.join(sorted(b))}" for what, b in found.items()) + ".")


def page(o, r, path):
    parts = []
    capacity = r.data["cells"].get("capacity/0")
    table = main_rows(o, r)
    if capacity:
        first = r.rounds(f"main/{o.loads[0]}/{o.methods[0]}")
        parts.append(f"""{ENGINES} simulated engines run behind each router, each with batches of {BATCH} requests and {BLOCKS:,} KV blocks of 16 tokens: a step takes 10 ms, 250 µs for each sequence and 60 µs for each prompt token.
Prompts are chats of {capacity['overall']['prompt_tokens'] / max(1, capacity['overall']['ok']):,.0f} tokens on average (log-normal), half of them common to one of 8 groups of a tenant, and answers {OUTPUT}.
100 % load is {capacity['rate']:.1f} requests a second, measured in a closed loop that keeps all batches full.
Targets of every request: first token within {TTFT:g} s, then {1000 * TPOT:g} ms per token.

- Arrivals are Poisson with the seed of the round, the same for every method. Latency counts from the time at which a request was due.
- Each cell has new engines and a new router: {o.warmup:g} s of warm-up, {o.seconds:g} s of measured arrivals, and {o.cooldown:g} s more of load until the rest is cut off. A request that is cut off counts with its wait.
- Figures are medians of {len(first) or o.rounds} rounds, with their range; of two for FIFO, haproxy and sglang-router, of {LIGHT_ROUNDS} below saturation, of {TENANT_ROUNDS} beside a greedy tenant, of one for the sessions. Every other round runs the methods in reverse order.
- The highest class offers {100 * HIGH:g} % of capacity at every load; of the rest, two thirds are three tenants of the normal class and one third is a tenant of the lowest.
- haproxy queues at `maxconn {BATCH}` a server, puts the highest class first, and refuses after {QUEUE_WAIT} s in the queue, as Sluice's FIFO queue does here. sglang-router admits {BATCH * ENGINES} requests at a time, `cache_aware`, and queues the others for at most {QUEUE_WAIT} s (then status 408); its tokens are refilled at 1 a second, because the default lets as many a second through as may run at once.
- {builds_text(r)}
- Other routers: {r.data.get("others") or versions(o) or "none"}.
""")
    if table:
        parts.append("![goodput, first token of the highest class and output tokens by load](overload.svg)\n")
    rows = goals(o, r)
    if rows:
        parts.append("## Goals\n\n| goal | measured | met |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n")
    if table:
        busiest = max(x["box"] for k, x in r.data["cells"].items() if k.startswith("main/"))
        parts.append("## Loads\n\n*Goodput* is the answers within both targets, per second. *Refused* is status 429 or 503, *failed* any other error. Times are in ms.\n\n"
                     "| load | method | goodput/s | first token p50 | p99 | p99 of the highest class | per token p99 | output tokens/s | refused, % | unanswered, % | failed, % | refusal p99 | machine CPU, % |\n"
                     "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(table) + "\n\n" +
                     ("The machine was at most %.0f %% busy, so the engines' timers set these times." % (100 * busiest) if busiest < 0.8 else
                      "**The machine was up to %.0f %% busy: run this again on a quieter one before you believe the small times.**" % (100 * busiest)) + "\n")
    if not table:
        parts.append("There are no results of loads yet.\n")
    rows = light_rows(r)
    if rows:
        parts.append("## Below saturation\n\nNo request waits long here, so the queue, which is on by default, must make no difference. The clients name no class, no tenant and no target. CPU is the router's, in ms for each request.\n\n"
                     "| load | method | first token p50, ms | p99, ms | per token p50, ms | CPU, ms |\n| --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n")
    rows = session_rows(r)
    if rows:
        x = (r.rounds("sessions/with") or r.rounds("sessions/without"))[0]
        parts.append(f"""## Sessions

`scripts/overload.py sessions`: {x['agents']} agents run a session of {x['turns'][0]} to {x['turns'][1]} turns each; a prompt grows by each answer and the result of a tool, and the tool takes {500 / x['speed']:.0f} ms on average.
Their working set is {x['working_set']:,.0f} tokens, the engines' KV {x['kv']:,} ({x['working_set'] / x['kv']:.1f} times less).

| limit of active sessions | prompt tokens found cached | all sessions ended after, s | a session, p50, s | longest, s | first token p50, ms | p99, ms | output tokens/s | sessions not ended |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}
""")
    text = """# Overload

This page shows what becomes of requests when more arrive than the engines can serve: through Sluice with its queue in three modes, and through other routers, on one simulated fleet.
`make overload` (`scripts/overload.py`) writes it.
Only the ratios of one run mean anything elsewhere.

""" + "\n".join(parts)
    with open(path, "w") as f:
        f.write(text)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("parts", nargs="*", metavar="PART", help="parts to measure instead of all but sessions: %s, sessions; or page, to write the page again" % ", ".join(PARTS))
    a.add_argument("--only", type=lambda s: s.split(","), default=[], metavar="PART,…", help="the same")
    a.add_argument("--resume", action="store_true", help="keep the cells that are measured already, also of the given parts")
    a.add_argument("--quick", action="store_true", help="a smoke test of 3 minutes: one round, short cells, three loads")
    a.add_argument("--loads", type=lambda s: [int(x) for x in s.split(",")], metavar="N,…", help="percent of capacity (60,95,150,200,300)")
    a.add_argument("--methods", type=lambda s: s.split(","), metavar="NAME,…", help="of " + ", ".join(METHODS))
    a.add_argument("--rounds", type=int, help="(3)")
    a.add_argument("--session-rounds", type=int, help="rounds of the part sessions (1)")
    a.add_argument("--agents", type=int, help="sessions of the part sessions (64)")
    a.add_argument("--seconds", type=float, help="measured time of a cell (9)")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--port", type=int, default=22000, help="first port to try; 42 free ones in a row are used")
    a.add_argument("--bin", default=os.path.join(ROOT, "bin", "sluice"))
    a.add_argument("--out", help="folder of overload.md and overload.svg (docs; with --quick build/overload)")
    o = a.parse_args()
    build = os.path.join(ROOT, "build", "overload")
    o.loads = o.loads or ([95, 300] if o.quick else [60, 95, 150, 200, 300])
    o.methods = o.methods or (["none", "fair", "haproxy"] if o.quick else list(METHODS))
    o.rounds = o.rounds or (1 if o.quick else 3)
    o.session_rounds = o.session_rounds or 1
    o.seconds = o.seconds or (3 if o.quick else 9)
    o.warmup, o.cooldown = (3, 2) if o.quick else (3, 3)
    o.agents = o.agents or (16 if o.quick else 64)
    o.turns, o.speed = ((5, 15), 4) if o.quick else ((20, 60), 2)
    o.out = o.out or (build if o.quick else os.path.join(ROOT, "docs"))
    parts = o.parts + o.only or PARTS
    for p in parts:
        if p not in (*PARTS, "sessions", "page"):
            a.error(f"part {p!r}; want {', '.join(PARTS)}, sessions or page")
    for m in o.methods:
        if m not in METHODS:
            a.error(f"method {m!r}; want {', '.join(METHODS)}")
    if min(o.loads) <= 100 * HIGH:
        a.error(f"--loads {min(o.loads)}; want more than {100 * HIGH:g}, which the highest class offers")
    if not os.access(o.bin, os.X_OK):
        sys.exit(f"{o.bin} is not built; run: make build")
    if "haproxy" in o.methods and "main" in parts and not shutil.which("haproxy"):
        sys.exit("haproxy is not installed; run: scripts/bootstrap.sh --bench (or leave it out with --methods)")
    if "sglang" in o.methods and "main" in parts:
        sglang_router()

    # Cells of other settings cannot share a page.
    settings = hashlib.sha256(json.dumps([SIM, ENGINES, PROMPT, OUTPUT, TTFT, TPOT, ENGINE_QUEUE, HIGH, QUIET, LIGHT, SLUICE, HAPROXY, o.seconds, o.warmup, o.seed]).encode()).hexdigest()[:12]
    r = Results(os.path.join(build, "quick.json" if o.quick else "results.json"), settings, sluice_build(o))
    if not o.resume:
        r.drop(parts)
    if "main" in parts:
        r.data["others"] = versions(o)
    bench = Bench(o, r)
    if set(parts) & set(PARTS):
        capacity = bench.capacity()
        for p in PARTS[1:]:
            if p in parts:
                getattr(bench, p)(capacity)
    if "sessions" in parts:
        bench.sessions()
    os.makedirs(o.out, exist_ok=True)
    if main_rows(o, r):
        svg(o, r, os.path.join(o.out, "overload.svg"))
    page(o, r, os.path.join(o.out, "overload.md"))
    say(f"wrote {os.path.join(o.out, 'overload.md')} after {(time.time() - bench.began) / 60:.0f} minutes")
    for row in goals(o, r):
        print(row)


main()
