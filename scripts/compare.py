#!/usr/bin/env python3
"""Compares Sluice with haproxy, nginx and the routers vllm-router, sglang-router and smg.

  scripts/compare.py [--report docs/compare.md] [--quick] [--only NAME,…] [--sections a,b] [--rounds N] [--seconds S]

All run by turns on the same mock engines, on one core each; engines and load have the other core. The
routers come from PyPI in the versions of PEERS, each in an environment of its own under
${SLUICE_CACHE:-~/.cache/sluice}/compare, installed once; haproxy and nginx are Debian's
(scripts/bootstrap.sh --bench). Every proxy has its default settings except for addresses, log level and the
number of retries that fail. A proxy that cannot be installed, does not start, or refuses a case has the
reason in the table.

Sections:

  json     requests that are not streamed: CPU per request by size of the prompt, for prompts never seen
           before, for prompts that repeat, and for prompts of token ids that the client gives. The engines
           (bench/relay/prompts) take less time than any proxy, so the proxy is always busy
  latency  one request at a time: what a proxy adds to the engine's own time, by size of the prompt
  streams  200 streams of `sluice sim` engines, an event each 10 ms: CPU per event; and, one stream
           at a time, what a proxy adds to the time to the first token
  pd       prefill/decode of `sluice sim` engines, a vLLM pair with NIXL and an SGLang pair: CPU per
           request, CPU per event, and the time to the first token, one stream at a time. The decode
           engine's metrics say whether the KV was handed over

CPU is what the kernel accounts to the proxy's processes (utime + stime); a measurement in which that is less
than 50 ms is repeated, because the kernel counts in steps of 10 ms. Figures are medians of the rounds
with ranges; every other round runs in reverse order. Only ratios within one run mean anything. --report
writes the page and the row of README.md that quotes it. The figures are kept in build/compare.json after
each section (build/compare-quick.json with --quick), and --from FILE makes the page of them again. The defaults take about 18 minutes, --quick 3.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import bench_proxies as b
from bench_prompts import Prompts

ENGINES, PROXY = 0, 1  # cores
CACHE = os.path.join(os.environ.get("SLUICE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sluice"), "compare")
PEERS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2", "smg": "1.13.0"}
BASE = "haproxy"
QUIET_WAIT = 180  # seconds to wait at most until the load average has fallen to BUSY
BUSY = 0.7  # load average before a run above which the page says that it is worth little
SIZES = [200, 4_000, 64_000, 1_000_000]
KINDS = {"new": "new each time", "same": "repeated", "load": "token ids, half of them new"}

SIM = ["sim", "--kv-events", "off", "--records", "-1", "--max-num-seqs", "4096", "--blocks", "65536", "--max-model-len", "131072",
       "--cost-admit", "-1ns", "--cost-seq", "-1ns", "--cost-prefill", "-1ns", "--cost-transfer", "-1ns", "--cost-handshake", "-1ns"]
PROMPT = ["--endpoint", "completions", "--prompt-tokens", "64"]
EVENTS = [*PROMPT, "--concurrency", "200", "--output-tokens", "200"]
FIRST = [*PROMPT, "--concurrency", "1", "--output-tokens", "2"]
PD_JSON = [*PROMPT, "--stream=false", "--concurrency", "32", "--output-tokens", "4"]
PD_EVENTS = [*PROMPT, "--concurrency", "100", "--output-tokens", "200"]
PD_FIRST = [*PROMPT, "--concurrency", "1", "--output-tokens", "4"]


class Unsupported(Exception):
    """A proxy cannot do a case; the text is the reason that the table shows."""


def say(text):
    print("compare: %s  %s" % (time.strftime("%H:%M:%S"), text), file=sys.stderr, flush=True)


# Proxies.


class Proxy:
    """A kind of proxy: how it is installed, started for plain engines and for a P/D pair."""

    def __init__(self, name):
        self.name, self.version, self.missing = name, "", ""

    def install(self):
        """Sets version, or missing to the reason why the proxy cannot run."""

    def plain(self, start, tmp, engines):
        """Returns (process, address, path that answers 200 when it is ready)."""
        raise NotImplementedError

    def pair(self, start, tmp, engine, prefill, bootstrap, decode):
        raise Unsupported("has no prefill/decode")


class Debian(Proxy):
    def __init__(self, name, make, *version):
        super().__init__(name)
        self.make, self.command = make, version

    def install(self):
        if not shutil.which(self.name):
            self.missing = "not installed (scripts/bootstrap.sh --bench)"
            return
        out = subprocess.run([self.name, *self.command], capture_output=True, text=True)
        self.version = re.search(r"\d+\.\d+[\d.]*", out.stdout + out.stderr).group()

    def plain(self, start, tmp, engines):
        return self.make(start, PROXY, tmp, *engines)[1:]


class Sluice(Proxy):
    def __init__(self, name, *flags):
        super().__init__(name)
        self.flags = flags

    def install(self):
        self.version = json.loads(subprocess.run([b.SLUICE, "version", "--json"], capture_output=True, text=True, check=True).stdout)["version"]

    def serve(self, start, *flags):
        p = start(PROXY, [b.SLUICE, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--log-level", "error", *flags, *self.flags], first_line=True)
        return p, p.addr, "/readyz"

    def plain(self, start, tmp, engines):
        return self.serve(start, *(x for e in engines for x in ("--engine", "http://%s,kv_events=off" % e)))

    def pair(self, start, tmp, engine, prefill, bootstrap, decode):
        more = ",bootstrap_port=%d" % bootstrap if engine == "sglang" else ""
        return self.serve(start, "--pd", "sglang" if engine == "sglang" else "nixl",
                          "--prefill", "http://%s,kv_events=off%s" % (prefill, more), "--decode", "http://%s,kv_events=off" % decode)


class PyPI(Proxy):
    """A router from PyPI. Its log goes to a file; only warnings and errors are asked for."""

    def __init__(self, name, command, level, vllm, sglang):
        super().__init__(name)
        self.folder = os.path.join(CACHE, "%s-%s" % (name, PEERS[name]))
        self.command, self.level, self.flags = command, level, {"vllm": vllm, "sglang": sglang}

    def install(self):
        self.version = PEERS[self.name]
        done = os.path.join(self.folder, ".done")
        if os.path.exists(done):
            return
        say("installing %s %s (once)" % (self.name, self.version))
        os.makedirs(CACHE, exist_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for argv in (
            [sys.executable, "-m", "venv", self.folder],
            [self.folder + "/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "%s==%s" % (self.name, self.version)],
        ):
            try:
                out = subprocess.run(argv, capture_output=True, text=True, timeout=600)
            except subprocess.TimeoutExpired:
                self.missing = "not installed: pip took more than 10 minutes"
                return
            if out.returncode:
                self.missing = "not installed: " + last_line(out.stderr)
                return
        open(done, "w").close()

    def serve(self, start, *flags):
        port = b.free_port()
        p = start(PROXY, [os.path.join(self.folder, "bin", self.name), *self.command, "--host", "127.0.0.1", "--port", str(port),
                          "--prometheus-host", "127.0.0.1", "--prometheus-port", str(b.free_port()), "--log-level", self.level, *flags])
        return p, "127.0.0.1:%d" % port, "/readiness"

    def plain(self, start, tmp, engines):
        return self.serve(start, "--worker-urls", *("http://" + e for e in engines))

    def pair(self, start, tmp, engine, prefill, bootstrap, decode):
        flags = self.flags[engine]
        if isinstance(flags, str):
            raise Unsupported(flags)
        return self.serve(start, *flags, "--prefill", "http://" + prefill, *([str(bootstrap)] if engine == "sglang" else []), "--decode", "http://" + decode)


PROXIES = [
    Debian("nginx", b.nginx, "-v"),
    Debian("haproxy", b.haproxy, "-v"),
    PyPI("vllm-router", [], "warning", ["--vllm-pd-disaggregation", "--kv-connector", "nixl"], "its P/D is for vLLM"),
    PyPI("sglang-router", ["launch"], "warn", "its P/D is for SGLang", ["--pd-disaggregation"]),
    PyPI("smg", ["launch"], "warn", ["--backend", "vllm", "--pd-disaggregation"], ["--pd-disaggregation"]),
    Sluice("sluice"),
    # What the routers above do: the choice is by text, and no engine is asked for token ids.
    Sluice("sluice, tokens.mode text", "--set", "tokens.mode=text"),
]


# Measurements.


class Running:
    def __init__(self, proxy, process, addr):
        self.name, self.process, self.addr = proxy.name, process, addr


class Figures:
    """The measured values by (section, row, column), and the reason for each that is missing."""

    def __init__(self):
        self.values, self.why = {}, {}

    def add(self, key, value):
        self.values.setdefault(key, []).append(value)

    def cell(self, key, digits=1):
        if key in self.values:
            return med(self.values[key], digits)
        return "– " + self.why[key] if key in self.why else "–"

    def save(self, path, about):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "w") as out:
            json.dump({"about": about, "values": list(self.values.items()), "why": list(self.why.items())}, out, indent=1)
        os.replace(path + ".part", path)

    @staticmethod
    def load(path):
        with open(path) as f:
            saved = json.load(f)
        figures = Figures()
        figures.values = {tuple(k): v for k, v in saved["values"]}
        figures.why = {tuple(k): v for k, v in saved["why"]}
        return figures, saved["about"]

    def ratio(self, key, base):
        x, y = self.values.get(key), self.values.get(base)
        if not x or not y:
            return None
        # Round by round; a proxy that failed in a round has fewer. No value is 0, see Bench.cpu.
        return statistics.median(p / q for p, q in zip(x, y))


def med(values, digits=1):
    return b.med(values, digits) if len(values) > 1 else "%.*f" % (digits, values[0])


def last_line(text):
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return re.sub(r"\x1b\[[0-9;]*m", "", lines[-1])[:160].replace("|", "/") if lines else "no output"


class Bench:
    def __init__(self, proxies, a):
        self.proxies, self.a = proxies, a
        self.figures, self.procs, self.tmp = Figures(), [], tempfile.mkdtemp(prefix="sluice-compare-")

    def start(self, *args, **kw):
        p = b.Process(*args, **kw)
        self.procs.append(p)
        return p

    def stop(self):
        for p in self.procs:
            p.stop()
        self.procs = []

    def close(self):
        self.stop()
        shutil.rmtree(self.tmp, ignore_errors=True)

    def running(self, section, start):
        """Starts every proxy by start(proxy) and returns those that answer a request."""
        got = []
        for proxy in self.proxies:
            why = proxy.missing
            if not why:
                try:
                    process, addr, path = start(proxy)
                    wait_for(process, addr, path)
                    got.append(Running(proxy, process, addr))
                    continue
                except Unsupported as e:
                    why = str(e)
            say("%s: %s: %s" % (section, proxy.name, why))
            self.figures.why[section, proxy.name] = why
        return got

    def rounds(self, section, running):
        for i in range(self.a.rounds):
            for r in running if i % 2 == 0 else reversed(running):
                say("%s: round %d of %d: %s" % (section, i + 1, self.a.rounds, r.name))
                yield r

    def measure(self, key, measurement):
        """Runs a measurement unless it has failed before; a failure is a cell's text."""
        if key in self.figures.why:
            return
        try:
            measurement()
        except Unsupported as e:
            self.figures.why[key] = str(e)
            say("%s: %s" % (", ".join(map(str, key)), e))

    def cpu(self, process, work):
        """Runs work, which returns how many things were done, and returns the CPU of one in µs."""
        for _ in range(3):
            before = process.cpu()
            done = work()
            used = process.cpu() - before
            if used >= 0.05 and done > 0:
                return used / done * 1e6, done
        raise Unsupported("too little done to measure; is the machine busy?")

    def load(self, addr, *flags):
        argv = ["taskset", "-c", str(ENGINES), b.SLUICE, "load", "--url", "http://" + addr, "--json", "--quiet", "--timeout", "20s", *flags]
        try:
            out = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            raise Unsupported("the load did not end") from None
        if out.returncode != 0 or not out.stdout.strip():
            raise Unsupported("no request succeeded: " + last_line(out.stderr or out.stdout))
        rep = json.loads(out.stdout)
        # A request in a thousand may fail, and more of a proxy are not a figure for the others.
        if rep["failed"] > rep["ok"] / 1000:
            raise Unsupported("%d of %d requests failed: %s" % (rep["failed"], rep["requests"], ", ".join(rep.get("errors", {}))[:100]))
        return rep

    # JSON.

    def json(self, latency):
        prompts = [Prompts(self.start, self.tmp) for _ in range(2)]
        engines = [p.addr for p in prompts]
        running = self.running("json", lambda p: p.plain(self.start, self.tmp, engines))
        kinds, sizes = (["new"], SIZES) if self.a.quick else (list(KINDS), SIZES)
        if self.a.quick:
            sizes = [SIZES[0], SIZES[2]]

        def ask(addr, kind, size, seconds, connections):
            # An id is about seven bytes.
            size = size // 7 if kind == "load" else size
            out = subprocess.run(["taskset", "-c", str(ENGINES), prompts[0].binary, kind, addr.rsplit(":", 1)[1], str(connections), str(size), "%.2f" % seconds],
                                 capture_output=True, text=True, timeout=60)
            if out.returncode:
                raise Unsupported(refusal(out.stderr))
            return [float(x) for x in out.stdout.split()]

        def cpu(r, kind, size):
            ask(r.addr, kind, size, self.a.seconds / 4, 16)
            each, answered = self.cpu(r.process, lambda: ask(r.addr, kind, size, self.a.seconds, 16)[0])
            self.figures.add(("json", r.name, kind, size), each)
            self.figures.add(("rate", r.name, kind, size), answered / self.a.seconds)

        def one(name, addr, size):
            _, _, p50, p99 = ask(addr, "new", size, self.a.seconds, 1)
            self.figures.add(("p50", name, size), p50)
            self.figures.add(("p99", name, size), p99)

        for r in self.rounds("json", running):
            for kind in kinds:
                for size in sizes:
                    self.measure(("json", r.name, kind, size), lambda: cpu(r, kind, size))
        for r in running:
            self.figures.add(("rss", r.name), r.process.rss_kib() / 1024)
        if latency:
            alone = [Running(Proxy("the engine alone"), None, engines[0])]
            for r in self.rounds("latency", alone + running):
                for size in sizes:
                    self.measure(("p50", r.name, size), lambda: one(r.name, r.addr, size))

    # Streams.

    def streams(self):
        engines = [self.start(ENGINES, [b.SLUICE, *SIM, "--cost-step", "10ms"], first_line=True).addr for _ in range(2)]
        for e in engines:
            b.wait_ready(e, "/health")
        running = self.running("streams", lambda p: p.plain(self.start, self.tmp, engines))

        def events(r):
            self.figures.add(("event", r.name), self.events(r, EVENTS, 2 * self.a.seconds))

        def first(name, addr):
            rep = self.load(addr, *FIRST, "--duration", "%.1fs" % (2 * self.a.seconds))
            for q in ("p50", "p99"):
                self.figures.add(("first " + q, name), rep["ttft"][q + "_ms"])

        alone = [Running(Proxy("the engine alone"), None, engines[0])]
        for r in self.rounds("streams", alone + running):
            if r.process:
                self.measure(("event", r.name), lambda: events(r))
            self.measure(("first p50", r.name), lambda: first(r.name, r.addr))

    def events(self, r, flags, seconds):
        """Returns the CPU per event in µs."""
        self.load(r.addr, *flags, "--duration", "0.3s")

        def chunks():
            rep = self.load(r.addr, *flags, "--duration", "%.1fs" % seconds)
            return rep["chunks_per_second"] * rep["seconds"]

        return self.cpu(r.process, chunks)[0]

    # Prefill/decode.

    def pd(self, engine):
        section, bootstrap = "pd " + engine, b.free_port()
        sim = [b.SLUICE, *SIM, "--engine", engine, "--cost-step", "5ms"]
        prefill = self.start(ENGINES, [*sim, "--role", "prefill", *(["--bootstrap", "127.0.0.1:%d" % bootstrap] if engine == "sglang" else [])], first_line=True).addr
        decode = self.start(ENGINES, [*sim, "--role", "decode"], first_line=True).addr
        for e in (prefill, decode):
            b.wait_ready(e, "/health")
        proxies = [p for p in self.proxies if "text" not in p.name]
        running = []
        for proxy in proxies:
            before = handed_over(decode)
            got = self.running_one(section, proxy, lambda p: p.pair(self.start, self.tmp, engine, prefill, bootstrap, decode))
            if not got:
                continue
            try:
                self.load(got.addr, *PD_JSON, "--requests", "20")
            except Unsupported as e:
                self.figures.why[section, proxy.name] = str(e)
                continue
            if engine == "vllm" and handed_over(decode) == before:
                self.figures.why[section, proxy.name] = "both engines computed the prompt: no KV was handed over"
                continue
            running.append(got)

        def requests(r):
            self.load(r.addr, *PD_JSON, "--duration", "0.3s")
            each, _ = self.cpu(r.process, lambda: self.load(r.addr, *PD_JSON, "--duration", "%.1fs" % (2 * self.a.seconds))["ok"])
            self.figures.add((section, r.name, "request"), each)

        def first(r):
            rep = self.load(r.addr, *PD_FIRST, "--duration", "%.1fs" % (2 * self.a.seconds))
            for q in ("p50", "p99"):
                self.figures.add((section, r.name, q), rep["ttft"][q + "_ms"])

        for r in self.rounds(section, running):
            self.measure((section, r.name, "request"), lambda: requests(r))
            self.measure((section, r.name, "event"), lambda: self.figures.add((section, r.name, "event"), self.events(r, PD_EVENTS, 2 * self.a.seconds)))
            self.measure((section, r.name, "p50"), lambda: first(r))

    def running_one(self, section, proxy, start):
        everyone, self.proxies = self.proxies, [proxy]
        try:
            got = self.running(section, start)
        finally:
            self.proxies = everyone
        return got[0] if got else None


def wait_for(process, addr, path, seconds=60):
    """Waits until a proxy is ready and has answered a request."""
    body = json.dumps({"model": "sim", "prompt": "Say which of these is ready to serve.", "max_tokens": 2}).encode()
    end, last = time.time() + seconds, ""
    while time.time() < end:
        if process.p.poll() is not None:
            raise Unsupported("ended at the start: " + last_line(process.stderr()))
        try:
            urllib.request.urlopen("http://%s%s" % (addr, path), timeout=5).close()
            request = urllib.request.Request("http://%s/v1/completions" % addr, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10).close()
            return
        except (OSError, ValueError) as e:
            last = str(e)
        time.sleep(0.2)
    raise Unsupported("not ready after %d s: %s" % (seconds, last[:100]))


def handed_over(decode):
    """Returns how many prompt tokens a vLLM decode engine has received from a prefill engine."""
    with urllib.request.urlopen("http://%s/metrics" % decode, timeout=10) as r:
        return sum(float(x) for x in re.findall(r'^vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer"\} (\S+)', r.read().decode(), re.M))


def refusal(text):
    """Returns the status of an answer that the load of bench/relay/prompts printed."""
    m = re.search(r"HTTP/1\.1 (\d+)", text)
    return "refused with %s" % m.group(1) if m else last_line(text)


# The page.


def table(head, rows):
    return "\n".join("| %s |" % " | ".join(cells) for cells in [head, ["---"] * len(head), *rows])


def size_name(size):
    return "%d B" % size if size < 1000 else "%d KB" % (size // 1000)


def json_tables(f, names):
    out = []
    for kind, what in KINDS.items():
        sizes = [s for s in SIZES if any((k[0], k[2:]) == ("json", (kind, s)) for k in f.values)]
        if not sizes:
            continue
        rows = []
        for n in names:
            row = [n]
            for s in sizes:
                key, ratio = ("json", n, kind, s), f.ratio(("json", n, kind, s), ("json", BASE, kind, s))
                row += [f.cell(key), "%.2f" % ratio if ratio else "–"]
            rows.append(row if ("json", n) not in f.why else [n, "– " + f.why["json", n]] + [""] * (2 * len(sizes) - 1))
        out.append("Prompts %s:\n\n%s" % ("of " + what if kind == "load" else what, table(["CPU µs per request"] + [x for s in sizes for x in (size_name(s), "to " + BASE)], rows)))
    return "\n\n".join(out)


def latency_table(f, names):
    sizes = [s for s in SIZES if ("p50", "the engine alone", s) in f.values]
    if not sizes:
        return ""
    rows = [["the engine alone", *(x for s in sizes for x in (f.cell(("p50", "the engine alone", s), 0), f.cell(("p99", "the engine alone", s), 0)))]]
    for n in names:
        row = [n]
        for s in sizes:
            for q in ("p50", "p99"):
                got, engine = f.values.get((q, n, s)), f.values[q, "the engine alone", s]
                row.append(med([x - y for x, y in zip(got, engine)], 0) if got else f.cell((q, n, s)))
        rows.append(row if ("json", n) not in f.why else [n, "– " + f.why["json", n]] + [""] * (2 * len(sizes) - 1))
    return table(["added µs"] + [size_name(s) + " " + q for s in sizes for q in ("p50", "p99")], rows)


def streams_table(f, names):
    alone = "the engine alone"
    if ("first p50", alone) not in f.values:
        return ""
    rows = []
    for n in names:
        if ("streams", n) in f.why:
            rows.append([n, "– " + f.why["streams", n], "", "", ""])
            continue
        ratio = f.ratio(("event", n), ("event", BASE))
        row = [n, f.cell(("event", n)), "%.2f" % ratio if ratio else "–"]
        for q in ("first p50", "first p99"):
            got = f.values.get((q, n))
            row.append(med([(x - y) * 1000 for x, y in zip(got, f.values[q, alone])], 0) if got else f.cell((q, n)))
        rows.append(row)
    return table(["", "CPU µs per event", "to " + BASE, "added first token p50 µs", "p99 µs"], rows)


def pd_table(f, names, engine):
    section, rows = "pd " + engine, []
    for n in names:
        if (section, n) in f.why:
            rows.append([n, "– " + f.why[section, n], "", "", "", ""])
            continue
        if not any(k[0] == section and k[1] == n for k in (*f.values, *f.why)):
            continue
        ratios = [f.ratio((section, n, what), (section, "sluice", what)) for what in ("request", "event")]
        rows.append([n, f.cell((section, n, "request")), "%.2f" % ratios[0] if ratios[0] else "–", f.cell((section, n, "event")),
                     "%.2f" % ratios[1] if ratios[1] else "–", "%s, %s" % (f.cell((section, n, "p50"), 2), f.cell((section, n, "p99"), 2))])
    return table(["", "CPU µs per request", "to sluice", "CPU µs per event", "to sluice", "first token p50, p99 ms"], rows)


PAGE = """# Comparison with other proxies and routers

This page compares what a request costs in Sluice, in haproxy and nginx, and in three routers for LLM engines.
`make compare` (`scripts/compare.py`) installs the others, runs all by turns on the same mock engines, and writes this page and the row of README.md that quotes it.
`make compare QUICK=1` takes three minutes and prints the tables only.
The script's first lines say what each table measures.

%(conditions)s

%(versions)s

All proxies have one core to themselves, and engines and load share another.
Figures are medians of the rounds with ranges (rounds: %(rounds)d); ratios are medians of the ratios within a round.
Settings are the defaults, with two engines: nginx and haproxy choose in turn, the others by what they think the engines' caches hold.
haproxy and nginx look at no byte of a body; the others read it, and choose.

## Requests that are not streamed

In its default mode Sluice asks an engine for the token ids of a prompt of text that it has not seen (`/tokenize`), so that it knows which blocks the engine will look up.
That is most of what a new prompt costs it, and a prompt that it has seen costs none of it.
With `tokens.mode: text` it chooses by the text, as the other routers do.
Token ids that the client gives need neither.

%(json)s

Resident memory after these runs: %(rss)s.

## Added latency

One request at a time with a new prompt: the time through the proxy, minus the engine's own.
With text, Sluice's default mode makes one more exchange with an engine, which is in the figure.

%(latency)s

## Streams

200 streams with an event each 10 ms, prompts of about 64 tokens of text.
The first token is measured with one stream at a time, and is what the proxy adds to the engine's own time, which is one step.

%(streams)s

## Prefill/decode

A vLLM pair with NIXL hand-over:

%(vllm)s

An SGLang pair:

%(sglang)s

The engines take 5 ms for a step and nothing for prompts and transfers, so a first token takes two steps where prefill goes first, and what the router adds.
"""


def describe_run(a, proxies, began, load_before):
    """Returns what the page says of the run, for the file of its figures."""
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    conditions = "%s, Linux %s, %s; %d cores; load average %.1f before the run and %.1f after it, which took %d minutes." % (
        datetime.date.today().isoformat(), platform.release().split("-")[0], cpu.strip(), os.cpu_count(), load_before, os.getloadavg()[0], round((time.time() - began) / 60))
    if load_before > BUSY:
        conditions += "\n\n**The machine was busy with other work: run it again on a quiet one before quoting a figure.**"
    versions = [[p.name, p.version or "–", p.missing or ("PyPI" if isinstance(p, PyPI) else "Debian" if isinstance(p, Debian) else "this repository")]
                for p in proxies if "text" not in p.name]
    return {"conditions": conditions, "versions": versions, "names": [p.name for p in proxies], "rounds": a.rounds, "sections": a.sections,
            "busy": load_before > BUSY}


def page(f, about):
    names, pd = about["names"], "pd" in about["sections"]
    rss = ", ".join("%s %.0f MiB" % (n, f.values["rss", n][0]) for n in names if ("rss", n) in f.values) or "–"
    none = "Not measured in this run."
    return PAGE % {
        "conditions": about["conditions"], "versions": table(["", "version", "from"], about["versions"]), "rounds": about["rounds"], "rss": rss,
        "json": json_tables(f, names) or none, "latency": latency_table(f, names) or none, "streams": streams_table(f, names) or none,
        "vllm": pd_table(f, names, "vllm") if pd else none, "sglang": pd_table(f, names, "sglang") if pd else none,
    }


def readme_row(f, about):
    """Returns the row of README.md, of whatever has been measured."""
    reported = []

    def ratio(text, key, base):
        r = f.ratio(key, base)
        if r:
            reported.append(text % r)

    for kind, text in (("new", "a request that is not streamed costs, of haproxy's CPU: with a new prompt of 4 KB of text %.2f"), ("same", "with the same prompt again %.2f"),
                       ("load", "with 4 KB of token ids that the client gives, half of them new, %.2f")):
        ratio(text, ("json", "sluice", kind, 4_000), ("json", BASE, kind, 4_000))
    ratio("an event of a stream costs %.2f of haproxy's", ("event", "sluice"), ("event", BASE))
    others = [r for r in (f.ratio(("json", n, "new", 4_000), ("json", BASE, "new", 4_000)) for n in PEERS) if r]
    if others:
        reported.append("the other routers' new prompt of 4 KB of text %.2f to %.2f" % (min(others), max(others)))
    if about["busy"]:
        reported.append("measured on a busy machine")
    return "| `make compare` | Sluice beside haproxy, nginx, vllm-router, sglang-router and smg on the same mock engines | %s ([docs/compare.md](docs/compare.md)) |" % "; ".join(reported)


def write_readme(f, about):
    path = os.path.join(b.ROOT, "README.md")
    text = open(path).read()
    new, n = re.subn(r"^\| `make compare` \|.*$", lambda _: readme_row(f, about), text, flags=re.M)
    if n != 1:
        sys.exit("README.md has %d rows of `make compare`; want 1" % n)
    with open(path, "w") as out:
        out.write(new)


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, help="rounds (default: 3, with --quick 1)")
    ap.add_argument("--seconds", type=float, help="seconds of a measurement; some take a multiple (default: 1.5, with --quick 1)")
    ap.add_argument("--only", default="", help="comma-separated names of the proxies to run; haproxy is the base of ratios")
    ap.add_argument("--sections", default="json,latency,streams,pd", help="comma-separated sections")
    ap.add_argument("--quick", action="store_true", help="one round, new prompts of two sizes; three minutes")
    ap.add_argument("--from", dest="source", metavar="FILE", help="measure nothing and use the figures in FILE")
    ap.add_argument("--report", metavar="FILE", help="write the page to FILE and the row to README.md")
    a = ap.parse_args()
    a.rounds = a.rounds or (1 if a.quick else 3)
    a.seconds = a.seconds or (1.0 if a.quick else 1.5)
    a.sections = a.sections.split(",")
    unknown = set(a.sections) - {"json", "latency", "streams", "pd"}
    if unknown:
        ap.error("unknown section %s; want json, latency, streams or pd" % ", ".join(sorted(unknown)))
    names = [p.name for p in PROXIES]
    for n in filter(None, a.only.split(",")):
        if n not in names:
            ap.error("unknown proxy %r; want one of: %s" % (n, "; ".join(names)))
    return a


def main():
    a = arguments()
    if a.source:
        figures, about = Figures.load(a.source)
    else:
        figures, about = measure(a)
    if a.report:
        with open(a.report, "w") as out:
            out.write(page(figures, about))
        write_readme(figures, about)
        say("wrote " + a.report)
    else:
        print(page(figures, about))
        print(readme_row(figures, about))
    failed = ["%s: %s" % (" ".join(map(str, key)), why) for key, why in figures.why.items() if str(key[1]).startswith("sluice")]
    if failed:
        sys.exit("compare: Sluice itself could not be measured: " + "; ".join(failed))


def await_quiet():
    """Waits until what ran before, such as the build, has left the load average."""
    end = time.time() + QUIET_WAIT
    if os.getloadavg()[0] > BUSY:
        say("waiting up to %d s until the load average, %.1f now, is at most %.1f" % (QUIET_WAIT, os.getloadavg()[0], BUSY))
    while os.getloadavg()[0] > BUSY and time.time() < end:
        time.sleep(2)


def measure(a):
    if not os.path.exists(b.SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    if os.cpu_count() < 2:
        sys.exit("this needs two cores: one for the proxy, one for engines and load")
    proxies = [p for p in PROXIES if not a.only or p.name in a.only.split(",")]
    for p in proxies:
        p.install()
        if p.missing:
            print("skip  %s: %s" % (p.name, p.missing), flush=True)
    if not a.quick:
        await_quiet()
    began, load_before = time.time(), os.getloadavg()[0]
    bench = Bench(proxies, a)
    sections = [("json", lambda: bench.json("latency" in a.sections)), ("streams", bench.streams), ("pd", lambda: bench.pd("vllm")), ("pd", lambda: bench.pd("sglang"))]
    try:
        for name, section in sections:
            if name in a.sections or (name == "json" and "latency" in a.sections):
                section()
                bench.stop()
                about = describe_run(a, proxies, began, load_before)
                bench.figures.save(os.path.join(b.ROOT, "build", "compare-quick.json" if a.quick else "compare.json"), about)
    finally:
        bench.close()
    say("done after %d s" % (time.time() - began))
    return bench.figures, about


if __name__ == "__main__":
    main()
