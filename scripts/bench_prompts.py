#!/usr/bin/env python3
"""Measures the cost of an additional KB of token ids in a prompt, for each proxy.

The script compares requests of 16,384 ids with requests of 64 ids, over 16 connections,
through each proxy to one engine. Engine and load generator (bench/relay/prompts) are in C
and need less CPU than the proxy, so the proxy is always busy. With the simulated engine and
`sluice load` the proxy would wait nine tenths of the time if prompts are long, would find
its caches cold, and would need two to four times as much CPU for the rest of a request;
the measurement would attribute that to the prompt.

CPU is the time that the kernel accounts to the proxy's processes. The figures are the
median and the range of the rounds. Only ratios and differences within one run are meaningful.

  scripts/bench_prompts.py [--rounds N] [--seconds S] [--ids N] [--binary NAME=PATH]

With --text the prompts are text of the given sizes in KB, and each prompt is new: in the
default token mode the router requests the ids of each from the engine's /tokenize. The
script prints the CPU per request.

  scripts/bench_prompts.py --text 1,16,64,256,1000 [--connections N] [--binary NAME=PATH]
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench_proxies as b

CONNECTIONS, SHORT, LONG = 16, 64, 16384


class Prompts:
    """The engine, and the load generator for a proxy in front of it."""

    def __init__(self, start, tmp):
        self.binary = os.path.join(tmp, "prompts")
        subprocess.run(["cc", "-O2", "-o", self.binary, os.path.join(b.ROOT, "bench/relay/prompts/prompts.c")], check=True)
        port = b.free_port()
        start(0, [self.binary, "engine", str(port)])
        self.addr = "127.0.0.1:%d" % port
        b.wait_ready(self.addr, "/health")

    def load(self, addr, ids, seconds, kind="load", connections=CONNECTIONS):
        """Returns the number of requests answered and the size of one in bytes."""
        out = subprocess.run(
            ["taskset", "-c", "0", self.binary, kind, addr.rsplit(":", 1)[1], str(connections), str(ids), "%.2f" % seconds],
            capture_output=True, text=True,
        )
        if out.returncode != 0:
            sys.exit("load of %d ids against %s failed: %s" % (ids, addr, out.stderr[-500:]))
        return [int(x) for x in out.stdout.split()][:2]

    def request(self, process, addr, ids, seconds, **how):
        """Returns the proxy's CPU per request in µs and the size of a request in bytes."""
        self.load(addr, ids, seconds / 4, **how)
        before = process.cpu()
        answered, size = self.load(addr, ids, seconds, **how)
        return (process.cpu() - before) / answered * 1e6, size

    def kb(self, process, addr, seconds, ids=LONG):
        """Returns the µs of a long request, of a short one, and of each KB of their difference."""
        short, size = self.request(process, addr, SHORT, seconds)
        long, longer = self.request(process, addr, ids, seconds)
        return long, short, (long - short) / (longer - size) * 1000


def texts(prompts, proxies, a):
    """Prints the CPU per request with a new prompt, by size."""
    sizes = [int(kb) * 1000 for kb in a.text.split(",")]
    got = {(name, size): [] for name, _, _, _ in proxies for size in sizes}
    for i in range(a.rounds):
        for size in sizes:
            for name, p, addr, _ in proxies if i % 2 == 0 else reversed(proxies):
                got[name, size].append(prompts.request(p, addr, size, a.seconds, kind="text", connections=a.connections)[0])
    print("Median [range] of %d rounds of %.1fs; load average %.1f at the end.\n" % (a.rounds, a.seconds, os.getloadavg()[0]))
    base = proxies[0][0]
    print("| KB of text, new each time | " + " | ".join("%s, µs | ratio to %s" % (n, base) for n, _, _, _ in proxies) + " |")
    print("| --- |" + " --- | --- |" * len(proxies))
    for size in sizes:
        print("| %d | " % (size // 1000) + " | ".join("%s | %.2f" % (
            b.med(got[n, size]), statistics.median(g / h for g, h in zip(got[n, size], got[base, size]))) for n, _, _, _ in proxies) + " |")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement, in seconds")
    ap.add_argument("--ids", type=int, default=LONG)
    ap.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="another build of the router to measure; can be repeated")
    ap.add_argument("--text", metavar="KB,…", help="measure text prompts of these sizes")
    ap.add_argument("--connections", type=int, default=CONNECTIONS, help="number of connections; only with --text")
    a = ap.parse_args()
    for tool in ("haproxy", "taskset", "cc"):
        if not shutil.which(tool):
            sys.exit("%s is not installed; run: scripts/bootstrap.sh --bench" % tool)
    if not os.path.exists(b.SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    tmp, procs = tempfile.mkdtemp(prefix="sluice-prompts-"), []

    def start(*args, **kw):
        p = b.Process(*args, **kw)
        procs.append(p)
        return p

    try:
        prompts = Prompts(start, tmp)
        proxies = [b.haproxy(start, 1, tmp, prompts.addr), b.sluice(start, 1, "sluice", prompts.addr)]
        for one in a.binary:
            name, path = one.split("=", 1)
            proxies.append(b.sluice(start, 1, name, prompts.addr, binary=path))
        for _, _, addr, path in proxies:
            b.wait_ready(addr, path)
        if a.text:
            texts(prompts, proxies, a)
            return
        rows = {name: [] for name, _, _, _ in proxies}
        for i in range(a.rounds):
            # Every other round runs in reverse order, because conditions change during a round.
            for name, p, addr, _ in proxies if i % 2 == 0 else reversed(proxies):
                rows[name].append(prompts.kb(p, addr, a.seconds, a.ids))
        base = rows[proxies[0][0]]
        print("Median [range] of %d rounds of %.1fs; load average %.1f at the end.\n" % (a.rounds, a.seconds, os.getloadavg()[0]))
        print("| proxy | µs for %d ids | ratio to haproxy | µs for %d | a KB more, µs | above haproxy's |\n| --- | --- | --- | --- | --- | --- |" % (a.ids, SHORT))
        for name, got in rows.items():
            print("| %s | %s | %.2f | %s | %s | %.2f |" % (
                name, b.med([g[0] for g in got]), statistics.median(g[0] / h[0] for g, h in zip(got, base)),
                b.med([g[1] for g in got]), b.med([g[2] for g in got], 2), statistics.median(g[2] - h[2] for g, h in zip(got, base))))
    finally:
        for p in procs:
            p.stop()
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    main()
