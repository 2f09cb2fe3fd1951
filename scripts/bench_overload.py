#!/usr/bin/env python3
"""What a relayed event costs when a proxy on one core gets more than it can relay: streams
of small chunked events that the engine sends without a pause, through each proxy in turn.
Engine and load (bench/relay/overload) are in C, share the other core and need less than
the proxy, so the proxy stays saturated.

  µs an event      CPU that the kernel charged the proxy's processes
  events a write   events that the client received for each write of the proxy. A proxy that
                   falls behind can only save by reading and writing more events at a time
  core             share of a core that the proxy used; below 0.95 it was not saturated
  p50, p99         from the engine's send to the client's read. Compare these with paced
                   events (--rates 50); without a pause they are the length of the queues

Figures are medians of the rounds with their range; the ratio is taken in each round.

  scripts/bench_overload.py [--streams N] [--rates 0,50] [--rounds N] [--seconds S] [--binary NAME=PATH]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench_proxies as b


class Overload:
    """The engine, and what loads a proxy in front of it."""

    def __init__(self, start, tmp):
        self.binary = os.path.join(tmp, "overload")
        subprocess.run(["cc", "-O2", "-o", self.binary, os.path.join(b.ROOT, "bench/relay/overload/overload.c")], check=True)
        port = b.free_port()
        self.engine = start(0, [self.binary, "engine", str(port)])
        self.addr = "127.0.0.1:%d" % port
        b.wait_ready(self.addr, "/health")

    def measure(self, process, addr, streams, rate, seconds):
        """Figures of one run: a dict."""
        p = subprocess.Popen(
            ["taskset", "-c", "0", self.binary, "load", addr.rsplit(":", 1)[1], str(streams), str(rate), "%.2f" % seconds],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        began = p.stdout.readline() == "measuring\n"
        before = process.cpu()
        line = p.stdout.readline()
        cpu = process.cpu() - before
        error = p.stderr.read()
        if p.wait() != 0 or not began:
            sys.exit("load of %d streams against %s failed: %s" % (streams, addr, error[-500:]))
        rep = json.loads(line)
        return {
            "us": cpu / rep["events"] * 1e6, "core": cpu / seconds, "per_write": rep["events"] / max(rep["writes"], 1),
            "rate": rep["events"] / seconds, "p50": rep["p50_us"], "p99": rep["p99_us"],
        }


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--streams", type=int, default=1000)
    ap.add_argument("--rates", default="0", metavar="N,…", help="events per second of each stream, one table for each; 0: without a pause")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement, in seconds")
    ap.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="another build of the router to measure; may be repeated")
    a = ap.parse_args()
    if not os.path.exists(b.SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    if os.cpu_count() < 2:
        sys.exit("two cores are needed: one for the proxy, one for engine and load")
    for tool in ("haproxy", "taskset", "cc"):
        if not shutil.which(tool):
            sys.exit("%s is not installed; run: scripts/bootstrap.sh --bench" % tool)
    tmp, procs = tempfile.mkdtemp(prefix="sluice-overload-"), []

    def start(*args, **kw):
        p = b.Process(*args, **kw)
        procs.append(p)
        return p

    try:
        overload = Overload(start, tmp)
        proxies = [b.haproxy(start, 1, tmp, overload.addr), b.sluice(start, 1, "sluice", overload.addr)]
        for one in a.binary:
            name, path = one.split("=", 1)
            proxies.append(b.sluice(start, 1, name, overload.addr, binary=path))
        for _, _, addr, path in proxies:
            b.wait_ready(addr, path)
        base = proxies[0][0]
        for rate in [int(r) for r in a.rates.split(",")]:
            rows = {name: [] for name, _, _, _ in proxies}
            for i in range(a.rounds):
                # Every other round backwards: who comes first finds another machine than who comes last.
                for name, p, addr, _ in proxies if i % 2 == 0 else reversed(proxies):
                    rows[name].append(overload.measure(p, addr, a.streams, rate, a.seconds))
            print("\n%d streams, %s; median [range] of %d rounds of %.1f s; load average %.1f at the end.\n" % (
                a.streams, "%d events/s each" % rate if rate else "without a pause", a.rounds, a.seconds, os.getloadavg()[0]))
            print("| proxy | µs an event | to %s | events a write | core | events/s | p50 µs | p99 µs |\n| --- | --- | --- | --- | --- | --- | --- | --- |" % base)
            for name, got in rows.items():
                print("| %s | %s | %.2f | %s | %.2f | %s | %s | %s |" % (
                    name, b.med([g["us"] for g in got], 2), statistics.median(g["us"] / h["us"] for g, h in zip(got, rows[base])),
                    b.med([g["per_write"] for g in got], 2), statistics.median(g["core"] for g in got),
                    b.med([g["rate"] for g in got], 0), b.med([g["p50"] for g in got], 0), b.med([g["p99"] for g in got], 0)), flush=True)
    finally:
        for p in procs:
            p.stop()
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    main()
