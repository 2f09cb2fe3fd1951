#!/usr/bin/env python3
"""Compares the scheduling policies on a simulated fleet with one trace of chats.

    make policies            (scripts/policies.py --help lists the options)

For each policy and load the script starts N simulated engines and a router, and `sluice
load` replays the same seeded trace of conversations with its timing. The script writes
docs/policies.md and docs/policies.svg. The load is a fraction of the rate that round robin
reaches on this fleet in a closed loop, which is measured first. The engines simulate
computation with timers, so the machine only moves bytes; the table shows its utilisation.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

POLICIES = ["kv", "session", "least_loaded", "round_robin"]
NAMES = {"kv": "KV-aware", "session": "session hashing", "least_loaded": "least loaded", "round_robin": "round robin"}
COLOURS = {"kv": "#1f6feb", "session": "#bf8700", "least_loaded": "#8250df", "round_robin": "#cf222e"}
BLOCK = 512  # tokens that one id of the trace represents


def trace(path_warm, path_run, warm, run, seed):
    """Writes the trace: each conversation has one of 12 system prompts (some much more frequent
    than others) of 512 to 2,560 tokens, then turns. The prompt of a turn is the conversation
    so far and 60 to 900 new tokens. Turns are 4 to 30 s apart; the nominal rate is 1 request
    per second."""
    rng = random.Random(seed)
    systems = [rng.randint(1, 5) for _ in range(12)]
    requests, at, chat = [], 0.0, 0
    turns_mean = 5
    while len(requests) < 3 * (warm + run):
        at += rng.expovariate(1 / turns_mean)
        chat += 1
        which = min(int(rng.paretovariate(0.9)) - 1, len(systems) - 1)
        ids = [which * 1000 + i for i in range(systems[which])]
        length, own, when = len(ids) * BLOCK, 0, at
        for _ in range(1 + min(int(rng.expovariate(1 / (turns_mean - 1))), 15)):
            length += min(900, 60 + int(rng.expovariate(1 / 220)))
            while len(ids) * BLOCK < length:
                own += 1
                ids.append(1_000_000 + chat * 1000 + own)
            requests.append((when, {"timestamp": 0, "input_length": length, "output_length": 16 + min(int(rng.expovariate(1 / 40)), 160),
                                    "hash_ids": list(ids), "session": f"chat-{chat}"}))
            when += rng.uniform(4, 30)
    requests.sort(key=lambda r: r[0])
    # The first conversations run without others; the trace begins when their number is steady.
    skip = len(requests) // 4
    requests = requests[skip:skip + warm + run]
    for path, part in ((path_warm, requests[:warm]), (path_run, requests[warm:])):
        with open(path, "w") as f:
            for when, r in part:
                f.write(json.dumps(r | {"timestamp": round(when * 1000, 1)}) + "\n")
    span = requests[-1][0] - requests[0][0]
    tokens = sum(r["input_length"] for _, r in requests) / len(requests)
    return len(requests) / span, tokens


def cpu_of(pid):
    with open(f"/proc/{pid}/stat") as f:
        v = f.read().rsplit(")", 1)[1].split()
    return (int(v[11]) + int(v[12])) / os.sysconf("SC_CLK_TCK")


def cpu_box():
    with open("/proc/stat") as f:
        v = [int(x) for x in f.readline().split()[1:]]
    idle = v[3] + v[4]
    return sum(v[:8]) - idle, sum(v[:8])


class Fleet:
    """The engines and the router of one cell."""

    def __init__(self, o, policy):
        self.procs, self.dir = [], tempfile.TemporaryDirectory()
        base = o.port
        engines = []
        for i in range(o.engines):
            port = base + 10 * i
            self.start([o.bin, "sim", "--listen", f"127.0.0.1:{port}", "--kv-events", f"tcp://127.0.0.1:{port + 1}",
                        "--kv-replay", f"tcp://127.0.0.1:{port + 2}", "--blocks", str(o.blocks),
                        "--cost-prefill", f"{o.prefill_us}us", "--cost-step", "12ms", "--cost-seq", "100us"])
            engines.append(f"http://127.0.0.1:{port}")
        self.url = f"http://127.0.0.1:{base + 10 * o.engines}"
        args = [o.bin, "serve", "--listen", self.url[7:], "--policy", policy]
        for e in engines:
            args += ["--engine", e]
        self.router = self.start(args, env=dict(os.environ, SLUICE_LOG_LEVEL="error", SLUICE_ADMIN_LISTEN="off"))
        end = time.time() + 20
        while not self.ready(o.engines):
            if time.time() > end:
                reported = "".join(open(os.path.join(self.dir.name, f)).read()[-500:] for f in sorted(os.listdir(self.dir.name)))
                self.close()
                sys.exit("the router did not become ready; is another run using the ports? (--port)\n" + reported)
            time.sleep(0.1)

    def start(self, args, env=None):
        log = open(os.path.join(self.dir.name, f"{len(self.procs)}.log"), "w")
        p = subprocess.Popen(args, stdout=log, stderr=log, env=env)
        self.procs.append(p)
        return p

    def ready(self, n):
        try:
            with urllib.request.urlopen(self.url + "/metrics", timeout=1) as r:
                text = r.read().decode()
        except OSError:
            return False
        return text.count('state="ready"') == n and text.count("sluice_rank_feed_live{") == n and ' 0\n' not in "".join(
            line + "\n" for line in text.splitlines() if line.startswith("sluice_rank_feed_live{"))

    def load(self, o, path, *more):
        args = [o.bin, "load", "--url", self.url, "--endpoint", "completions", "--token-ids", "--trace", path, "--json", "--quiet",
                "--duration", "1h", *more]
        box, all_, router = *cpu_box(), cpu_of(self.router.pid)
        own, began = self.own(), time.time()
        out = subprocess.run(args, capture_output=True, text=True)
        if not out.stdout:
            sys.exit("sluice load: " + out.stderr)
        rep = json.loads(out.stdout)
        box2, all2 = cpu_box()
        rep["box"] = (box2 - box) / max(1, all2 - all_)
        rep["own"] = (self.own() - own) / (time.time() - began) / os.cpu_count()
        rep["router"] = (cpu_of(self.router.pid) - router) / (time.time() - began)
        if rep["failed"] or rep["dropped"]:
            sys.exit(f"{rep['failed']} requests failed, {rep['dropped']} were dropped: {rep.get('errors')}")
        return rep

    def own(self):
        """Returns the CPU seconds of engines, router and load generator."""
        t = os.times()
        return sum(cpu_of(p.pid) for p in self.procs) + t.children_user + t.children_system

    def close(self):
        for p in reversed(self.procs):
            p.send_signal(signal.SIGTERM)
        for p in self.procs:
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                p.kill()
        self.dir.cleanup()


def closed_loop(o, warm, run):
    """Returns the requests per second of round robin with all engines busy."""
    f = Fleet(o, "round_robin")
    try:
        f.load(o, warm, "--concurrency", str(16 * o.engines))
        return f.load(o, run, "--concurrency", str(16 * o.engines))["requests_per_second"]
    finally:
        f.close()


def without_sessions(path):
    """Writes the trace without sessions and returns its path. Only session hashing needs them;
    with the KV-aware policy the router would also use them for affinity."""
    bare = path + ".bare"
    with open(path) as f, open(bare, "w") as out:
        for line in f:
            r = json.loads(line)
            del r["session"]
            out.write(json.dumps(r) + "\n")
    return bare


def cell(o, policy, speed, warm, run):
    if policy != "session":
        warm, run = without_sessions(warm), without_sessions(run)
    f = Fleet(o, policy)
    try:
        f.load(o, warm, "--trace-speed", f"{speed:.4f}")
        r = f.load(o, run, "--trace-speed", f"{speed:.4f}")
    finally:
        f.close()
    placed = list(r["requests_by_worker"].values()) + [0] * (o.engines - len(r["requests_by_worker"]))
    return {"p50": r["ttft"]["p50_ms"], "p99": r["ttft"]["p99_ms"], "hit": r["cached_tokens"] / r["prompt_tokens"],
            "predicted": r["predicted_cached_tokens"] / r["prompt_tokens"], "spread": max(placed) * o.engines / sum(placed),
            "box": r["box"], "own": r["own"], "router": r["router"], "late": r["send_delay"]["p99_ms"], "rate": r["requests_per_second"], "out": r["output_tokens_per_second"], "n": r["ok"]}


def svg(o, cells, path):
    """Draws three plots: TTFT p50 and p99 on logarithmic scales, and the hit rate."""
    import math
    w, h, left, top = 300, 220, 52, 30
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * w + 20} {h + 40}" font-family="sans-serif" font-size="11">',
           f'<rect width="{3 * w + 20}" height="{h + 40}" fill="white"/>']
    for k, (key, title) in enumerate([("p50", "first token, p50 (ms)"), ("p99", "first token, p99 (ms)"), ("hit", "prompt tokens found cached (%)")]):
        x0, x1, y0, y1 = k * w + left, (k + 1) * w - 12, h - 10, top
        values = [c[key] for c in cells.values()]
        if key == "hit":
            lo, hi = 0, 100
            ticks = [0, 25, 50, 75, 100]
            y = lambda v: y0 - (v * 100 - lo) / (hi - lo) * (y0 - y1)
            label = lambda t: (t / 100, str(t))
        else:
            lo, hi = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
            ticks = range(lo, hi + 1)
            y = lambda v: y0 - (math.log10(v) - lo) / max(1, hi - lo) * (y0 - y1)
            label = lambda t: (10 ** t, f"{10 ** t:g}")
        out.append(f'<text x="{x0}" y="16" font-weight="bold">{title}</text>')
        for t in ticks:
            v, text = label(t)
            out.append(f'<line x1="{x0}" x2="{x1}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/><text x="{x0 - 5}" y="{y(v) + 4:.1f}" text-anchor="end">{text}</text>')
        x = lambda i: x0 + 20 + i * (x1 - x0 - 40) / max(1, len(o.loads) - 1)
        for i, load in enumerate(o.loads):
            out.append(f'<text x="{x(i):.1f}" y="{y0 + 16}" text-anchor="middle">{load} %</text>')
        for p in POLICIES:
            pts = [(x(i), y(cells[p, load][key])) for i, load in enumerate(o.loads)]
            out.append(f'<polyline fill="none" stroke="{COLOURS[p]}" stroke-width="2" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in pts)}"/>')
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[p]}"/>' for a, b in pts]
    for i, p in enumerate(POLICIES):
        out.append(f'<rect x="{left + i * 150}" y="{h + 20}" width="12" height="4" fill="{COLOURS[p]}"/><text x="{left + 18 + i * 150}" y="{h + 26}">{NAMES[p]}</text>')
    out.append("</svg>\n")
    with open(path, "w") as f:
        f.write("\n".join(out))


def page(o, cells, capacity, tokens, path):
    rows = []
    for load in o.loads:
        for p in POLICIES:
            c = cells[p, load]
            rows.append(f"| {load} % | {NAMES[p]} | {c['p50']:,.0f} | {c['p99']:,.0f} | {100 * c['hit']:.0f} % | {100 * c['predicted']:.0f} % | "
                        f"{c['out']:,.0f} | {c['spread']:.2f} | {c['late']:.1f} | {100 * c['own']:.0f} % | {100 * c['box']:.0f} % | {100 * c['router']:.1f} % |")
    top = max(o.loads)
    gain = ""
    if top > 100:
        ratio = cells["kv", top]["out"] / cells["round_robin", top]["out"] - 1
        gain = f" At {top} % load the KV-aware choice yields {100 * ratio:+.0f} % over round robin."
    busiest = max(c["box"] for c in cells.values())
    verdict = ("so the engines' timers, not the machine, set these times" if busiest < 0.8 else
               "**which is too busy: run it again on a quieter machine before believing the small times**")
    text = f"""# Comparison of scheduling policies

This page compares the KV-aware choice with session hashing, least loaded and round robin on a simulated fleet.
`make policies` (`scripts/policies.py`) writes it.
The figures are of one run; only their ratios mean anything elsewhere.
[placement.md](placement.md) compares them on modelled engines, with more traces and what is possible at best.

{o.engines} simulated engines (aggregated, {o.blocks:,} KV blocks of 16 tokens each, {o.prefill_us} µs of timer a prompt token, 12 ms a step) run behind one router.
A seeded trace of chats is played at its own times: one of 12 system prompts of 512 to 2,560 tokens, five turns on average, each with all before it as its prompt, {tokens:,.0f} tokens a prompt on average.
Every policy and load gets the same requests in the same order; only the clock runs faster.
{o.warm:,} requests fill the caches, the next {o.requests:,} are measured.
100 % load is {capacity:.1f} requests a second: what round robin does in a closed loop on the same fleet and trace.

![first token and hit rate by load](policies.svg)

| load | policy | first token p50, ms | p99, ms | prompt found cached | predicted | output tokens/s | busiest rank / mean | send delay p99, ms | own CPU | machine CPU | router CPU |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

- First token is counted from the time in the trace, not from the time of sending.
- *Output tokens/s* is of the time from the first request to the last answer; above 100 % load that is what the fleet can do.{gain}
- *Found cached* is what the engines report, *predicted* what the router expected at its choice.
- Session hashing places each conversation by a hash of its `X-Sluice-Session`, whatever the load; the other policies do not see sessions.

The machine is not what is measured: engines compute by timers, so a step costs next to nothing.

- *Own CPU* is what engines, router and load took of all cores together.
- *Machine CPU* is what was in use in all (at most {100 * busiest:.0f} %, {verdict}).
- *Router CPU* is of one core.
- *Send delay* is how far the load generator lagged behind the trace.
"""
    with open(path, "w") as f:
        f.write(text)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    a.add_argument("--bin", default=os.path.join(root, "bin", "sluice"))
    a.add_argument("--engines", type=int, default=8)
    a.add_argument("--blocks", type=int, default=3000, help="KV blocks per engine")
    a.add_argument("--prefill-us", type=int, default=400, help="compute time of a prompt token, in microseconds")
    a.add_argument("--warm", type=int, default=200, help="requests that fill the caches before the measurement")
    a.add_argument("--requests", type=int, default=500, help="requests measured in each cell")
    a.add_argument("--loads", type=lambda s: [int(x) for x in s.split(",")], default=[60, 80, 95, 200, 300])
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--port", type=int, default=21000, help="first port to use; each engine uses ten")
    a.add_argument("--out", default=os.path.join(root, "docs"), help="folder of policies.md and policies.svg")
    o = a.parse_args()
    if not os.access(o.bin, os.X_OK):
        sys.exit(f"{o.bin} is not built; run: make build")
    with tempfile.TemporaryDirectory() as d:
        warm, run = os.path.join(d, "warm.jsonl"), os.path.join(d, "run.jsonl")
        rate, tokens = trace(warm, run, o.warm, o.requests, o.seed)
        capacity = closed_loop(o, warm, run)
        print(f"100 % load: {capacity:.1f} requests per second", flush=True)
        cells = {}
        for load in o.loads:
            for p in POLICIES:
                c = cells[p, load] = cell(o, p, capacity * load / 100 / rate, warm, run)
                print(f"{load:3} %  {NAMES[p]:16} first token p50 {c['p50']:8,.0f} ms  p99 {c['p99']:8,.0f} ms  cached {100 * c['hit']:3.0f} %  output {c['out']:6,.0f}/s  "
                      f"box {100 * c['box']:3.0f} %", flush=True)
    svg(o, cells, os.path.join(o.out, "policies.svg"))
    page(o, cells, capacity, tokens, os.path.join(o.out, "policies.md"))


main()
