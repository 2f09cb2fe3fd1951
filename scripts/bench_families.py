#!/usr/bin/env python3
"""Measures the cost of a prefill/decode request in the router, for each P/D family.

Two simulated engines of each family and the load generator share one core; the router has
the other core to itself. If their tools are installed, the same run measures two baselines:
haproxy in front of one engine, and a relay in C (bench/relay/legs) that only sends each
request to two engines, which is the lower bound for two legs on this machine.
The script prints a Markdown table:

  CPU         of the router per request, both legs: short completions of 64 token ids,
              not streamed, 16 concurrent requests (--concurrency)
  same rate   the same CPU at a fixed rate of requests (--rate), equal for all rows. With
              a fixed concurrency the engines determine the rate, and a router that
              handles fewer requests per wake-up pays more for each
  added TTFT  one stream at a time: time to first token through the router minus that of
              the legs sent directly to the engines (both in sequence, or only decode if
              both start together). It includes the traffic between the simulated engines
              for the hand-over.

  scripts/bench_families.py [--rounds N] [--seconds S] [--families a,b] [--report docs/pd-cost.md] [--calls] [--streams TOKENS] [--binary NAME=PATH]

--calls also counts system calls per request, in a separate run because strace makes them slow.

--binary adds another build of the router, with engines of its own: each round measures each
family on both builds in sequence.

The defaults take about 5 minutes. Only ratios within one run are meaningful.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import bench_proxies
from bench_proxies import SLUICE, Process, free_port, load, med, wait_ready

ENGINES, ROUTER = 0, 1  # cores
HAPROXY, LEAST = "haproxy, one leg", "relay in C, two legs"  # rows

SIM = ["sim", "--kv-events", "off", "--records", "-1", "--max-num-seqs", "4096", "--blocks", "65536", "--speed", "inf",
       "--cost-admit", "-1ns", "--cost-seq", "-1ns", "--cost-prefill", "-1ns", "--cost-transfer", "-1ns", "--cost-handshake", "-1ns"]
CPU_LOAD = ["--stream=false", "--endpoint", "completions", "--token-ids", "--prompt-tokens", "64", "--output-tokens", "4"]
STREAM_LOAD = ["--endpoint", "completions", "--token-ids", "--prompt-tokens", "64", "--output-tokens"]  # followed by their number
ONE = ["--endpoint", "completions", "--token-ids", "--concurrency", "1", "--prompt-tokens", "64"]

# Flags of each family's engines, and the number of legs that run in sequence.
FAMILIES = {
    "aggregated": ([], 1),
    "nixl": ([], 2),
    "nixl-push": (["--pd", "nixl-push"], 1),
    "sglang": (["--engine", "sglang"], 1),
    "mooncake": (["--pd", "mooncake"], 1),
    "orchestrated": (["--pd", "orchestrated"], 2),
    "lmcache": (["--pd", "lmcache"], 2),
    "trtllm": (["--engine", "trtllm"], 2),
    "storage": ([], 2),  # the simulated store belongs to one process, so decode computes the prompt, at no cost
}


PAGE = """# Cost of a P/D request

This page says what a prefill/decode request costs the router, family by family, in CPU and in time to the first token.
`scripts/bench_families.py --calls --report docs/pd-cost.md` (`make bench-families`) writes it and explains what it measures.
Run it on a quiet machine.

%s

Other routers, each in a run of its own, took a multiple of haproxy's one leg (16 µs there) for both legs: sglang-router 8, vllm-router 9.
production-stack and llm-d's sidecar, on a busier machine, took more.
The engines' own hand-over is in the added time and not in the CPU.

## The minimum

The relay in C (`bench/relay/legs`) sends each request to two engines as `nixl` does, with the handle copied, and does nothing else: no choice, no check, no timeout, no metric.
Its cost is the kernel's; io_uring saved a seventh of such a relay's cost where it was tried.
It costs one and a half times what haproxy takes for one leg, and it adds most of a P/D stream's time to the first token.
The request passes from one processor to another four times, and each has gone to sleep or to another task meanwhile; engines and load share one of them.

- On this machine the target of 200 µs is therefore out of reach where a handle passes from leg to leg through the router.
- The target of 45 µs of CPU was set where haproxy took 16, so it means 2.8 of haproxy's one leg.
- Machines differ: on another one, where haproxy took 30.4 µs, four families of an earlier build took 2.82 to 3.08.

## Where the rest goes

**System calls.** They are those of the relay in C (3 sends, 3 reads, as many waits) and two more kinds of reads.
One looks, as the answer leaves, for a pipelined request.
One looks at each engine connection before it is used again, for a close or for unsolicited bytes.
Further waits are the Go scheduler's, when it runs out of work.

**Minimum of a family.** A family of two legs needs six calls: three sends, three reads (the request, prefill's answer, decode's), and a wait for each of the three that arrives alone, whether the legs run one after the other or at once.
`lmcache` needs one more read, of the notification that the KV was written.
It arrives on a connection of its own and seldom together with anything else, so there is one more wait, and a goroutine to wake.
No family asks an engine anything for each request: engine ids and facts from handles are cached.

**Differences between families.** `nixl`, `nixl-push`, `mooncake`, `trtllm` and `lmcache` have engines that take longer here for their hand-over.
Fewer requests arrive at a time, each wakes a processor for itself, and code and data are cold by then.
`storage` and `orchestrated` do as much, at twice the rate and more; haproxy's one leg above runs at several times the rate.
At one rate for all (the columns of the same rate) the families of two legs are close together, at about twice haproxy's one leg.
The relay in C behaves likewise: 43 µs at 64 requests at once and 58 at 16, `nixl` 98 and 114 (one run of 3 s each; `--concurrency`).

**Profile.** By `perf record` of a short request on one worker 48 %% of the samples are the kernel's, 12 %% the Go runtime's (most of it the scheduler's), 6 %% the front's, 5 %% each the runner's with its families and the JSON scan's, and 4 %% the engine connections'.
No function of Sluice has 2 %%.
The approximate index took 6 %% of a `nixl` request in an earlier profile; engines with KV events do without it.

**Allocations.** A request leaves one allocation, its id.
Where both legs must have an id of their own (`nixl-push`, and `nixl` of engines before vLLM 0.14) it leaves a second.
`TestServeAllocates` holds that, with one more for its client.

**Choice of decode.** The router reads prefill's answer twice before it sends decode, and chooses decode then, by the load of that moment.
Moving the choice into the wait for prefill would not show beside the cost of the hand-overs between processors.

**`trtllm`** does more than `nixl` in user space, by some 2 %% of a request: its answers hold the prompt's ids before the usage, and its parameters are cut out of decode's answer.
An answer with 16,384 ids takes 35 µs (`go test ./dataplane/relay -run xxx -bench UsageOfLong`).
Of the rest the kernel has 46 %%, with more waits a request than `nixl`, because its engines take longer here.

The read for a pipelined request costs no visible CPU.
With 0.9 of such reads less, a request took 0.98 and 0.99 (`nixl`), 1.01 and 1.01 (`trtllm`), 1.00 (`lmcache`) and 1.02 (`orchestrated`) of its cost, 10 to 12 rounds each.

These attempts gave nothing for prompts of 256 KB ([sidecar.md](sidecar.md)):

- Waking when 128 KB have arrived and not for each packet (SO_RCVLOWAT) saves no wait on the loopback, where everything is there when the reader looks.
- Sends of 256 KB in place of 64 without MSG_MORE cost 1.08 of the version before; with it 0.93 and less.
- Reads of 256 KB in place of 64 cost no less.
"""


class Bench:
    def __init__(self):
        self.procs = []

    def start(self, core, *argv, binary=SLUICE):
        p = Process(core, [binary, *argv], first_line=True)
        self.procs.append(p)
        return p

    def stop(self):
        for p in self.procs:
            p.stop()
        self.procs = []

    def engine(self, *flags):
        p = self.start(ENGINES, *SIM, *flags)
        wait_ready(p.addr, "/health")
        return p.addr

    def least(self, tmp):
        """Starts the relay in C in front of two engines and returns its process."""
        source, binary, port = os.path.join(bench_proxies.ROOT, "bench/relay/legs/legs.c"), os.path.join(tmp, "legs"), free_port()
        subprocess.run(["cc", "-O2", "-o", binary, source], check=True)
        engines = [self.engine("--role", role).rsplit(":", 1)[1] for role in ("prefill", "decode")]
        p = Process(ROUTER, [binary, str(port), *engines])
        self.procs.append(p)
        p.addr = "127.0.0.1:%d" % port
        wait_ready(p.addr, "/health")
        return p

    def router(self, family, flags, binary=SLUICE):
        """Starts a router in front of two engines of the family and returns its process."""
        more, prefill, decode = [], [], []
        common = ["serve", "--listen", "127.0.0.1:0", "--admin", "off", "--log-level", "error"]
        if family == "aggregated":
            p = self.start(ROUTER, *common, "--engine", "http://%s,kv_events=off" % self.engine(), binary=binary)
            wait_ready(p.addr, "/readyz")
            return p
        options = {"prefill": "", "decode": ""}
        if family in ("sglang", "mooncake"):
            port = free_port()
            prefill = ["--bootstrap", "127.0.0.1:%d" % port]
            options["prefill"] = ",bootstrap_port=%d" % port
        if family == "lmcache":
            proxy, side = free_port(), free_port()
            flags = [*flags, "--lmcache-proxy", "tcp://127.0.0.1:%d" % proxy]
            decode = ["--side-port", str(side)]
            options["decode"] = ",init_port=%d,alloc_port=%d" % (side, side)
            more = ["--nixl-proxy-host", "127.0.0.1", "--nixl-proxy-port", str(proxy)]
        urls = [self.engine(*flags, "--role", "prefill", *prefill), self.engine(*flags, "--role", "decode", *decode)]
        p = self.start(ROUTER, *common, "--pd", family, *more,
                       "--prefill", "http://%s,kv_events=off%s" % (urls[0], options["prefill"]),
                       "--decode", "http://%s,kv_events=off%s" % (urls[1], options["decode"]), binary=binary)
        wait_ready(p.addr, "/readyz")
        return p


def cpu_of(process, addr, pace, seconds, what=CPU_LOAD):
    flags = [*what, *pace, "--duration"]
    load(ENGINES, addr, *flags, "0.3s")
    before = process.cpu()
    rep = load(ENGINES, addr, *flags, seconds)
    return (process.cpu() - before) / rep["ok"] * 1e6, rep["requests_per_second"]


CALLS = {"sends": ("sendto", "sendmsg", "write", "writev"), "reads": ("recvfrom", "read"), "waits": ("epoll_wait", "epoll_pwait"),
         "futex": ("futex",), "others": ()}


def calls_of(process, addr, concurrency):
    """Returns the system calls per request by kind; "of which empty" counts the reads that failed, mostly with EAGAIN."""
    flags = [*CPU_LOAD, "--concurrency", str(concurrency), "--duration"]
    load(ENGINES, addr, *flags, "0.3s")
    tracer = subprocess.Popen(["strace", "-f", "-c", "-U", "name,calls,errors", "-p", str(process.p.pid)], stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)  # strace attaches
    rep = load(ENGINES, addr, *flags, "2s")
    tracer.send_signal(signal.SIGINT)
    found = dict.fromkeys([*CALLS, "of which empty"], 0)
    for line in tracer.communicate(timeout=30)[1].splitlines():
        words = line.split()
        if len(words) < 2 or not words[1].isdigit() or words[0] == "total":
            continue
        kind = next((k for k, names in CALLS.items() if words[0] in names), "others")
        found[kind] += int(words[1])
        if kind == "reads" and len(words) > 2:
            found["of which empty"] += int(words[2])
    return {k: n / rep["ok"] for k, n in found.items()}


def first_token(addr, seconds):
    rep = load(ENGINES, addr, *ONE, "--output-tokens", "4", "--duration", seconds)
    return [rep["ttft"][q] * 1000 for q in ("p50_ms", "p99_ms")]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=2.5, help="duration of each measurement, in seconds")
    ap.add_argument("--concurrency", type=int, default=16, help="concurrent requests while CPU is measured")
    ap.add_argument("--rate", type=int, default=1500, help="requests per second for the measurement of CPU at equal rates; 0 skips it")
    ap.add_argument("--streams", type=int, default=0, metavar="TOKENS", help="measure the CPU of streams of this many tokens instead of whole responses")
    ap.add_argument("--families", default=",".join(FAMILIES))
    ap.add_argument("--calls", action="store_true", help="also count system calls; needs strace")
    ap.add_argument("--report", help="also write the page to this file")
    ap.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="another build of the router to measure; can be repeated")
    a = ap.parse_args()
    if not os.path.exists(SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    if os.cpu_count() < 2 or not shutil.which("taskset"):
        sys.exit("this needs two cores and taskset: one core for the router, one for engines and load")
    names = a.families.split(",")
    unknown = [n for n in names if n not in FAMILIES]
    if unknown:
        sys.exit("unknown family: %s; the families are %s" % (", ".join(unknown), ", ".join(FAMILIES)))
    seconds = "%.1fs" % a.seconds
    builds = [("", SLUICE), *(b.split("=", 1) for b in a.binary)]
    what = [*STREAM_LOAD, str(a.streams)] if a.streams else CPU_LOAD
    rows, legs = {}, {}
    bench, tmp = Bench(), tempfile.mkdtemp(prefix="sluice-families-")
    try:
        straight = bench.engine()
        proxies = {}  # name -> process, address

        def add(name, process, addr, of):
            proxies[name], legs[name] = (process, addr), of
            rows[name] = {"cpu": [], "same": [], "rps": [], "p50": [], "p99": []}

        if shutil.which("haproxy"):
            def start(core, argv):
                p = Process(core, argv)
                bench.procs.append(p)
                return p

            _, p, addr, path = bench_proxies.haproxy(start, ROUTER, tmp, straight)
            wait_ready(addr, path)
            add(HAPROXY, p, addr, 1)
        if shutil.which("cc"):
            p = bench.least(tmp)
            add(LEAST, p, p.addr, 2)
        for n in names:
            for build, binary in builds:
                p = bench.router(n, FAMILIES[n][0], binary)
                add(n + (build and ", " + build), p, p.addr, FAMILIES[n][1])
        for i in range(a.rounds):
            print("round %d of %d" % (i + 1, a.rounds), file=sys.stderr)
            leg = load(ENGINES, straight, *ONE, "--stream=false", "--output-tokens", "1", "--duration", seconds)["end_to_end"]
            alone = first_token(straight, seconds)
            for n, (p, addr) in proxies.items():
                row = rows[n]
                cpu, rps = cpu_of(p, addr, ["--concurrency", str(a.concurrency)], seconds, what)
                row["cpu"].append(cpu)
                if a.rate:
                    row["same"].append(cpu_of(p, addr, ["--rate", str(a.rate)], seconds, what)[0])
                row["rps"].append(rps)
                before = leg["p50_ms"] * 1000 * (legs[n] - 1)
                got = first_token(addr, seconds)
                row["p50"].append(got[0] - alone[0] - before)
                row["p99"].append(got[1] - alone[1] - before)
        calls = {}
        if a.calls and shutil.which("strace"):
            print("system calls", file=sys.stderr)
            calls = {n: calls_of(p, addr, a.concurrency) for n, (p, addr) in proxies.items()}
    finally:
        bench.stop()
        shutil.rmtree(tmp, ignore_errors=True)
    lines = ["Median [range] of %d rounds of %s on %d cores; load average %.1f at the end." % (a.rounds, seconds, os.cpu_count(), os.getloadavg()[0])]

    def ratio(r, to, what="cpu"):
        if to not in rows:
            return "–"
        return "%.2f" % statistics.median(x / y for x, y in zip(r[what], rows[to][what]))

    heads = ["", "CPU µs a request", "ratio to haproxy's one leg", "ratio to the least of two legs", "requests/s"]
    if a.rate:
        heads += ["CPU µs at %d a second" % a.rate, "ratio to haproxy's at that rate"]
    heads += ["added TTFT p50 µs", "added TTFT p99 µs"]
    lines += ["", "| %s |" % " | ".join(heads), "| --- |%s" % (" --- |" * (len(heads) - 1))]
    for n, r in rows.items():
        cells = [n, med(r["cpu"]), ratio(r, HAPROXY), ratio(r, LEAST), med(r["rps"], 0)]
        if a.rate:
            cells += [med(r["same"], 0), ratio(r, HAPROXY, "same")]
        lines.append("| %s |" % " | ".join([*cells, med(r["p50"], 0), med(r["p99"], 0)]))
    if calls:
        kinds = list(next(iter(calls.values())))
        kinds.insert(kinds.index("reads") + 1, kinds.pop())
        lines += ["", "| system calls a request | %s |" % " | ".join(kinds), "| --- |%s" % (" --- |" * len(kinds))]
        lines += ["| %s | %s |" % (n, " | ".join("%.2f" % c[k] for k in kinds)) for n, c in calls.items()]
    print("\n".join(lines))
    if a.report:
        with open(a.report, "w", encoding="utf-8") as f:
            f.write(PAGE % "\n".join(lines))


if __name__ == "__main__":
    main()
