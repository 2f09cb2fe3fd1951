#!/usr/bin/env python3
"""Measures the memory per running stream of a whole router.

bin/sluice serve runs in front of simulated engines, one per 3,000 streams (a router opens
at most 4,096 connections to an engine). The streams start at once, or within --over
seconds, and then receive an event every 3 s. The script prints the growth of the process's
resident memory (VmRSS) since before the streams, divided by their number, at several times
after all of them have started. The admission queue is off: it would give engines whose step
takes so long only some of 3,000 prompts in each.

  ids     prompts of 64 token ids; the router has served eight streams before, then idled
  text    the same with prompts of about 512 tokens of text, all different: the router also
          caches their token ids and their blocks, each cache within its own bound

  scripts/bench_streams.py [--streams N] [--over SECONDS] [--at 8,16,24,32] [--only ids,text] [--binary NAME=PATH] [--rounds N]
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time

from bench_proxies import wait_ready

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLUICE = os.path.join(ROOT, "bin", "sluice")
STEP = 3  # seconds between two events of a stream
EACH = 3000  # streams per engine
START = 90  # seconds within which all streams must have started
REST = 8  # seconds before the first measurement, for the router to free what the first streams used
IDS = ["--endpoint", "completions", "--token-ids", "--prompt-tokens", "64"]
TEXT = ["--endpoint", "chat", "--prompt-tokens", "512", "--shared-prefix", "0"]
CASES = {"ids": IDS, "text": TEXT}


class Process:
    def __init__(self, *argv, binary=SLUICE):
        self.err = tempfile.TemporaryFile()
        self.p = subprocess.Popen([binary, *argv], stdout=subprocess.PIPE, stderr=self.err, text=True)
        self.addr = self.p.stdout.readline().strip()
        if not self.addr:
            sys.exit("%s did not start: %s" % (" ".join(argv), self.stderr()))

    def stderr(self):
        self.err.seek(0)
        return self.err.read().decode(errors="replace")[-2000:]

    def rss_kib(self):
        with open("/proc/%d/status" % self.p.pid) as f:
            return int(re.search(r"^VmRSS:\s+(\d+)", f.read(), re.M).group(1))

    def descriptors(self):
        return len(os.listdir("/proc/%d/fd" % self.p.pid))

    def stop(self):
        self.p.terminate()
        try:
            self.p.wait(10)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()


def load(addr, users, *flags):
    """Starts a load generator, which ends when its requests have ended."""
    return subprocess.Popen([SLUICE, "load", "--quiet", "--url", "http://" + addr, "--concurrency", str(users), "--seed", str(time.time_ns() % 2**32), *flags],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(running, what):
    if running.wait():
        sys.exit("%s failed: %s" % (what, running.stderr.read()[-1000:]))


def measure(binary, case, streams, over, at):
    prompts = CASES[case]
    procs = []
    sim = ["sim", "--kv-events", "off", "--records", "-1", "--max-num-seqs", str(2 * streams), "--cost-seq", "-1ns", "--cost-prefill", "-1ns", "--max-num-batched-tokens", str(1 << 24), "--blocks", str(80 * streams)]
    try:
        engines = []
        for _ in range(-(-streams // EACH)):
            engine = Process(*sim, "--cost-step", "%ds" % STEP)
            procs.append(engine)
            wait_ready(engine.addr, "/health")
            engines += ["--engine", "http://%s,kv_events=off" % engine.addr]
        knows = subprocess.run([binary, "config", "print-defaults"], capture_output=True, text=True).stdout  # an older build may have no queue
        queue = ["--set", "admission.mode=off"] if "\nadmission:" in knows else []
        router = Process("serve", "--listen", "127.0.0.1:0", "--admin", "off", "--log-level", "error", *queue, *engines, binary=binary)
        procs.append(router)
        wait_ready(router.addr, "/readyz")
        finish(load(router.addr, 8, *prompts, "--requests", "8", "--output-tokens", "2", "--duration", "60s"), "the first streams")
        time.sleep(REST)
        idle = router.rss_kib()
        tokens = (over + START + at[-1] + 60) // STEP
        running = load(router.addr, streams, *prompts, "--requests", str(streams), "--output-tokens", str(tokens), "--duration", "%ds" % (over + START + at[-1] + 120), *(["--rate", "%g" % (streams / over), "--max-in-flight", str(streams)] if over else []))
        end = time.time() + over + START
        while router.descriptors() < 2 * streams:
            if time.time() > end:
                sys.exit("after %d s the router has %d descriptors: not all of %d streams run" % (over + START, router.descriptors(), streams))
            time.sleep(0.5)
        row, began = [], time.time()
        for t in at:
            time.sleep(max(0, began + t - time.time()))
            if running.poll() is not None:
                sys.exit("the streams ended early: " + running.stderr.read()[-1000:])
            if router.descriptors() < 2 * streams:
                sys.exit("%d s after the start of all streams the router has %d descriptors: not all of %d streams run" % (t, router.descriptors(), streams))
            row.append((router.rss_kib() - idle) / streams)
        running.kill()
        running.wait()
        return idle, row
    finally:
        for p in reversed(procs):
            p.stop()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--streams", type=int, default=3000)
    ap.add_argument("--over", type=float, default=0, metavar="SECONDS", help="period over which the streams start, in seconds; 0: at once")
    ap.add_argument("--at", default="8,16,24,32", help="comma-separated times of measurement: seconds after all streams have started")
    ap.add_argument("--rounds", type=int, default=1)
    ap.add_argument("--only", default=",".join(CASES), help="comma-separated cases to run")
    ap.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="another build of the router to measure; can be repeated")
    a = ap.parse_args()
    if not os.path.exists(SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if 2 * a.streams + 200 > most:
        sys.exit("%d streams need %d descriptors in the router; this machine allows a process %d" % (a.streams, 2 * a.streams + 200, most))
    at = [int(t) for t in a.at.split(",")]
    builds = [b.split("=", 1) for b in a.binary] + [("sluice", SLUICE)]
    print("| KiB a stream, of %d | before, MiB | %s |" % (a.streams, " | ".join("%d s" % t for t in at)))
    print("|" + " --- |" * (len(at) + 2), flush=True)
    for case in a.only.split(","):
        for _ in range(a.rounds):
            for name, path in builds:
                idle, row = measure(path, case, a.streams, int(a.over), at)
                label = case if len(builds) == 1 else "%s: %s" % (case, name)
                print("| %s | %.0f | %s |" % (label, idle / 1024, " | ".join("%.1f" % k for k in row)), flush=True)


if __name__ == "__main__":
    main()
