#!/usr/bin/env python3
"""Measures the CPU that the access log takes of a request: a router with it and one without, by turns.

  scripts/bench_accesslog.py [--rounds N] [--seconds S] [--goal PERCENT]

Both are in front of one engine (bench/relay/prompts), on one core; engine and load have the other. Requests
are short completions of token ids that are not streamed, over 16 connections: the fast path throughout, so
that the log's share is as large as it can be. The log goes to a rotated file. CPU is what the kernel
accounts to the process, with the goroutine that writes the file. Rounds alternate, and every other one in
reverse order; the share is the median of the rounds' own.
"""
import argparse
import os
import shutil
import statistics
import sys
import tempfile

import bench_proxies as b
from bench_prompts import Prompts


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--seconds", type=float, default=1.5, help="duration of each measurement, in seconds")
    ap.add_argument("--goal", type=float, help="fail if the share is more than this many percent")
    a = ap.parse_args()
    if not os.path.exists(b.SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    tmp, procs = tempfile.mkdtemp(prefix="sluice-accesslog-"), []

    def start(*args, **kw):
        procs.append(b.Process(*args, **kw))
        return procs[-1]

    try:
        prompts, log = Prompts(start, tmp), os.path.join(tmp, "access.log")
        routers = [b.sluice(start, 1, "without", prompts.addr), b.sluice(start, 1, "with", prompts.addr, "--set", "access_log.output=file:" + log)]
        for _, _, addr, path in routers:
            b.wait_ready(addr, path)
        got = {"with": [], "without": []}
        for i in range(a.rounds):
            for name, p, addr, _ in routers if i % 2 == 0 else reversed(routers):
                got[name].append(prompts.request(p, addr, 64, a.seconds)[0])
        if not os.path.getsize(log):
            sys.exit("the access log is empty")
    finally:
        for p in procs:
            p.stop()
        shutil.rmtree(tmp, ignore_errors=True)
    shares = [100 * (w - o) / w for w, o in zip(got["with"], got["without"])]
    share = statistics.median(shares)
    print("CPU of a request: %s µs without the access log, %s µs with it, median [range] of %d rounds; load average %.1f." % (
        b.med(got["without"]), b.med(got["with"]), a.rounds, os.getloadavg()[0]))
    print("The access log takes %.1f %% of a request [%.1f–%.1f]." % (share, min(shares), max(shares)))
    if a.goal is not None and share > a.goal:
        sys.exit("the goal is %.1f %%" % a.goal)


if __name__ == "__main__":
    main()
