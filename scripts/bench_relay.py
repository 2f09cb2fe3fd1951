#!/usr/bin/env python3
"""Measures the cost of a relayed stream.

Each round measures the router, nginx, haproxy, a relay in C without HTTP (bench/relay/raw)
and a minimal proxy of Go's standard library (bench/relay/nethttp), one after the other, in
front of one simulated engine. Engine and load generator share one core; the proxy under
test has the other.

The figures are the median and the range of the rounds. CPU is the time that the kernel
accounts to the proxy's processes. Ratios are computed within each round; only they can be
compared between machines or days.

  event    µs of CPU per event of 200 streams with an event every 10 ms, including the
           requests that start them, for streams of 200 and of 1,000 events
  request  µs of CPU per short non-streamed completion, 64 connections
  a KB     µs of CPU per additional KB of a prompt: 16,384 token ids compared with 64, with
           an engine and a load generator that need less CPU than the proxy (bench_prompts.py)
  added    time to first token at 200 streams per second minus that of the engine alone
  KiB      resident memory that each of 200 streams adds
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench_prompts
import bench_proxies as b

# An open loop: a burst of 200 requests would measure its own queue.
FIRST_LOAD = ["--endpoint", "completions", "--token-ids", "--rate", "200", "--poisson", "--prompt-tokens", "64", "--output-tokens", "50"]
EVENT_LOAD = ["--endpoint", "completions", "--token-ids", "--concurrency", "200", "--prompt-tokens", "64", "--output-tokens"]


def raw(start, cpu, tmp, engine):
    binary = os.path.join(tmp, "raw")
    if not os.path.exists(binary):
        subprocess.run(["cc", "-O2", "-o", binary, os.path.join(b.ROOT, "bench/relay/raw/raw.c")], check=True)
    port = b.free_port()
    return "raw relay in C", start(cpu, [binary, str(port), engine.rsplit(":", 1)[1]]), "127.0.0.1:%d" % port, "/health"


def nethttp(start, cpu, tmp, engine):
    binary = os.path.join(tmp, "nethttp")
    if not os.path.exists(binary):
        subprocess.run(["go", "build", "-o", binary, "./bench/relay/nethttp"], check=True, cwd=b.ROOT)
    port = b.free_port()
    return "net/http ReverseProxy", start(cpu, [binary, "127.0.0.1:%d" % port, "http://" + engine]), "127.0.0.1:%d" % port, "/health"


def table(head, lines):
    print("\n" + "\n".join("| %s |" % " | ".join(cells) for cells in [head, ["---"] * len(head), *lines]))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement, in seconds")
    ap.add_argument("--first-seconds", type=float, default=8.0, help="duration of the measurement of first tokens, in seconds; at 200 streams a second, one in a hundred determines the p99")
    ap.add_argument("--only", default="", help="comma-separated prefixes of names; all others are skipped")
    ap.add_argument("--sluice", action="append", default=[], metavar="NAME=VARIABLE=VALUE", help="another router to measure, with this environment variable (for example SLUICE_RELAY_DRIVER=goroutine); can be repeated")
    ap.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="another build of the router to measure; can be repeated")
    ap.add_argument("--skip-long", action="store_true", help="skip streams of 1,000 events, which take 10 s each")
    ap.add_argument("--skip-json", action="store_true")
    ap.add_argument("--skip-first", action="store_true", help="skip the measurement of first tokens: many short rounds compare the events of two builds better than a few long ones")
    a = ap.parse_args()
    if not os.path.exists(b.SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    if os.cpu_count() < 2:
        sys.exit("this needs two cores: one for the proxy, one for engine and load")
    for tool in ("nginx", "haproxy", "taskset", "cc", "go"):
        if not shutil.which(tool):
            sys.exit("%s is not installed; run: scripts/bootstrap.sh --bench" % tool)

    tmp = tempfile.mkdtemp(prefix="sluice-bench-")
    procs = []

    def start(*args, **kw):
        p = b.Process(*args, **kw)
        procs.append(p)
        return p

    def wanted(name):
        return not a.only or any(name.startswith(o) for o in a.only.split(","))

    def proxies(engine):
        for name, make in (
            ("raw relay in C", raw), ("nginx", b.nginx), ("haproxy", b.haproxy), ("net/http", nethttp),
        ):
            if wanted(name):
                yield make(start, 1, tmp, engine)
        if wanted("sluice"):
            yield b.sluice(start, 1, "sluice", engine)
        for one in a.sluice:
            name, variable, value = one.split("=", 2)
            os.environ[variable] = value
            yield b.sluice(start, 1, name, engine)
            del os.environ[variable]
        for one in a.binary:
            name, path = one.split("=", 1)
            yield b.sluice(start, 1, name, engine, binary=path)

    try:
        sim = ["sim", "--kv-events", "off", "--records", "-1", "--max-num-seqs", "4096", "--cost-admit", "-1ns", "--cost-seq", "-1ns", "--cost-prefill", "-1ns", "--blocks", "65536"]
        paced = start(0, [b.SLUICE, *sim, "--cost-step", "10ms"], first_line=True)
        fast = start(0, [b.SLUICE, *sim, "--speed", "inf"], first_line=True)
        for s in (paced, fast):
            b.wait_ready(s.addr, "/health")
        streams, shorts, longs = list(proxies(paced.addr)), [], []
        if not a.skip_json:
            prompts = bench_prompts.Prompts(start, tmp)
            shorts, longs = list(proxies(fast.addr)), list(proxies(prompts.addr))
        for name, _, addr, path in streams + shorts + longs:
            b.wait_ready(addr, path)
            print("%s listens on %s" % (name, addr), file=sys.stderr)
        own = ["sluice", *(one.partition("=")[0] for one in a.sluice + a.binary)]
        b.BASELINES.update(addr for name, _, addr, _ in streams + shorts + longs if name not in own)

        rows, seconds = {}, "%.1fs" % a.seconds
        for name, p, _, _ in streams:
            rows[name] = {"rss": p.rss_kib()}
        for round_ in range(a.rounds):
            print("round %d of %d" % (round_ + 1, a.rounds), file=sys.stderr)
            first = ["--duration", "%.1fs" % a.first_seconds]
            if not a.skip_first:
                direct = b.load(0, paced.addr, *FIRST_LOAD, *first)
            # Every other round runs in reverse order, because conditions change during a round.
            for name, p, addr, _ in streams if round_ % 2 == 0 else reversed(streams):
                row = rows[name]
                b.load(0, addr, *EVENT_LOAD, "200", "--requests", "200")
                row.setdefault("kib", []).append((p.rss_kib() - row["rss"]) / 200)
                for key, tokens, until in ("event", "200", ["--duration", seconds]), ("long", "1000", ["--requests", "200"]):
                    if key == "long" and a.skip_long:
                        continue
                    before = p.cpu()
                    rep = b.load(0, addr, *EVENT_LOAD, tokens, *until)
                    row.setdefault(key, []).append((p.cpu() - before) / (rep["chunks_per_second"] * rep["seconds"]) * 1e6)
                    row.setdefault(key + "s a second", []).append(rep["chunks_per_second"])
                if a.skip_first:
                    continue
                rep = b.load(0, addr, *FIRST_LOAD, *first)
                for q in ("p50", "p99"):
                    row.setdefault(q, []).append((rep["ttft"][q + "_ms"] - direct["ttft"][q + "_ms"]) * 1000)
            for name, p, addr, _ in shorts:
                b.load(0, addr, *b.JSON_LOAD, "--duration", "0.3s")
                before = p.cpu()
                rep = b.load(0, addr, *b.JSON_LOAD, "--duration", "%.1fs" % (a.seconds / 2))
                rows[name].setdefault("json", []).append((p.cpu() - before) / rep["ok"] * 1e6)
            for name, p, addr, _ in longs:
                rows[name].setdefault("kb", []).append(prompts.kb(p, addr, a.seconds / 2)[2])

        def ratio(row, key, base):
            got = [x / y for x, y in zip(row[key], rows[base][key])]
            return "%.2f [%.2f–%.2f]" % (statistics.median(got), min(got), max(got))

        bases = [n for n in ("haproxy", "raw relay in C") if n in rows] or list(rows)[:1]
        events = [("event", "streams of 200")] + [("long", "streams of 1,000")] * (not a.skip_long)
        head = ["proxy"]
        for _, what in events:
            head += [what + ": µs an event"] + ["to " + base for base in bases]
        table(head + ["events/s", "KiB a stream"], [
            [name, *(cell for key, _ in events for cell in [b.med(r[key]), *(ratio(r, key, base) for base in bases)]),
             b.med(r["events a second"], 0), "%.0f" % statistics.median(r["kib"])]
            for name, r in rows.items()])
        if a.skip_json and a.skip_first:
            return
        table(["proxy", "request µs", "to " + bases[0], "a KB of prompt µs", "added first token p50 µs", "p99 µs"], [
            [name, *([b.med(r["json"]), ratio(r, "json", bases[0]), b.med(r["kb"])] if "json" in r else ["–"] * 3),
             *([b.med(r["p50"], 0), b.med(r["p99"], 0)] if "p50" in r else ["–", "–"])]
            for name, r in rows.items() if "json" in r or "p50" in r])
    finally:
        for p in procs:
            p.stop()
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    main()
