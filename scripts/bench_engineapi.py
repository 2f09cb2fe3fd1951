#!/usr/bin/env python3
"""Measures the cost of an item and of a request of the engine API: over the framed
socket (unix, TCP), over HTTP (/v1/completions unchanged, and the socket's equivalent,
/v1/engine/generate), and over a plain gRPC stream (bench/grpc: one engine, no choice,
the standard library's HTTP client), all with the same simulated engine.

The router, or the gRPC server, has a core to itself; engine and load generator share the
other. The figures are the median and the range of the rounds. CPU is the time that the
kernel accounts to the process. Ratios and differences are computed within each round; only
ratios can be compared between machines or days.

"sockets alone" is the lower bound (bench/engineapi/baseline.go): one thread with an epoll
instance that reads from the same engine and writes to the same load generator without
parsing. On the framed socket it writes an item of constant bytes for each event. The
difference between a protocol and this bound is the work beyond the sockets, in the kernel
(wake-ups, waits) or in user space. It includes how often the process sleeps, which differs
between the bound and a protocol, and between two engines: a process that wakes up later
finds more events at once.

  item     µs of CPU per item of 200 streams with an item every 10 ms, in user space and in
           the kernel; the sum is exact, its parts are the kernel's samples
  request  µs of CPU per request of 4 tokens, 64 users, an engine that answers immediately

  scripts/bench_engineapi.py [--rounds N] [--seconds S] [--only a,b] [--report docs/engine-api.md]
"""

import argparse
import contextlib
import glob
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench_proxies as b

BASE, ENGINE_API = "HTTP /v1/completions", "HTTP /v1/engine/generate"
FLOOR = "sockets alone, "
BEGIN, END = "<!-- bench-engineapi -->", "<!-- /bench-engineapi -->"


def build(tmp):
    """Builds the load generator and the gRPC server, which is a separate module."""
    load, grpc = os.path.join(tmp, "load"), os.path.join(tmp, "grpc")
    subprocess.run(["go", "build", "-o", load, "./bench/engineapi"], check=True, cwd=b.ROOT)
    subprocess.run(["go", "build", "-o", grpc, "."], check=True, cwd=os.path.join(b.ROOT, "bench", "grpc"))
    return load, grpc


def floor_of(name):
    """Returns the lower bound that a protocol is compared with, or None if it has none."""
    if name in (BASE, ENGINE_API):
        return FLOOR + "HTTP"
    return FLOOR + name.removeprefix("socket, ") if name.startswith("socket, ") else None


def put_load(argv, target, streams, tokens, seconds):
    out = subprocess.run(
        ["taskset", "-c", "0"] + argv + ["--target", target, "--streams", str(streams), "--tokens", str(tokens), "--duration", "%.2fs" % seconds],
        capture_output=True, text=True, timeout=180, env=dict(os.environ, GOMAXPROCS="1"),
    )
    if out.returncode != 0:
        sys.exit("load on %s failed: %s" % (target, out.stderr[-1500:]))
    rep = json.loads(out.stdout)
    if rep["Failed"] or not rep["Items"]:
        sys.exit("load on %s: %d of %d requests failed: %s" % (target, rep["Failed"], rep["Requests"], rep.get("Error")))
    return rep


def times(p):
    """Returns the user and kernel ticks of a process, its CPU seconds, and how often its threads slept.

    The scheduler counts the CPU seconds to the nanosecond, for threads that still exist (Go
    does not end threads). The ticks are samples of its clock."""
    with open("/proc/%d/stat" % p.p.pid) as f:
        fields = f.read().rsplit(")", 1)[1].split()
    total = sleeps = 0
    for task in glob.glob("/proc/%d/task/*" % p.p.pid):
        with contextlib.suppress(OSError), open(task + "/schedstat") as f:
            total += int(f.read().split()[0])
        with contextlib.suppress(OSError), open(task + "/status") as f:
            sleeps += next((int(line.split()[1]) for line in f if line.startswith("voluntary_ctxt")), 0)
    return int(fields[11]), int(fields[12]), total / 1e9, sleeps


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement, in seconds")
    ap.add_argument("--only", default="", help="comma-separated prefixes of names; all others are skipped")
    ap.add_argument("--note", default="", help="description of the machine, for the report")
    ap.add_argument("--report", help="also write the table into this page, between its markers")
    a = ap.parse_args()
    if not os.path.exists(b.SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    if os.cpu_count() < 2:
        sys.exit("this needs two cores: one for the router, one for engine and load")
    for tool in ("taskset", "go"):
        if not shutil.which(tool):
            sys.exit("%s is not installed" % tool)

    tmp = tempfile.mkdtemp(prefix="sb-")  # short, because the length of a socket's path is limited
    procs = []

    def start(*args, **kw):
        p = b.Process(*args, **kw)
        procs.append(p)
        return p

    def router(name, engine):
        path, port = os.path.join(tmp, name + ".sock"), b.free_port()
        conf = os.path.join(tmp, name + ".yaml")
        with open(conf, "w") as f:
            f.write("engine_api:\n  unix_socket: %s\n  listen: 127.0.0.1:%d\n  http: true\n" % (path, port))
        p = start(1, [b.SLUICE, "serve", "--config", conf, "--listen", "127.0.0.1:0", "--admin", "off", "--log-level", "error", "--engine", "http://%s,kv_events=off" % engine], first_line=True)
        b.wait_ready(p.addr, "/readyz")
        return p, path, port

    try:
        load, grpc = build(tmp)
        sim = ["sim", "--kv-events", "off", "--records", "-1", "--max-num-seqs", "4096", "--cost-admit", "-1ns", "--cost-seq", "-1ns", "--cost-prefill", "-1ns", "--blocks", "65536"]
        paced, fast = ["--cost-step", "10ms"], ["--speed", "inf"]
        sides = {}  # "item" and "request" -> name -> process, argv of the load, target
        for side, pace in (("item", paced), ("request", fast)):
            vllm = start(0, [b.SLUICE, *sim, *pace], first_line=True)
            sglang = start(0, [b.SLUICE, *sim, *pace, "--engine", "sglang", "--incremental-streaming-output"], first_line=True)
            for s in (vllm, sglang):
                b.wait_ready(s.addr, "/health")
            p, path, port = router(side, vllm.addr)
            g, gpath, gport = router(side + "s", sglang.addr)

            def floor(engine, *flags):
                return start(1, [load, "floor", "--engine", engine.addr, *flags], first_line=True)

            tokens = 200 if side == "item" else 4
            prompt = [300 + i * 7 % 900 for i in range(64)]
            asked = json.dumps({"model": "sim", "token_ids": prompt, "stream": True, "stream_options": {"include_usage": True}, "sampling_params": {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}})
            native = json.dumps({"model": "sim", "input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}})
            frames = ["--frames", "--path", "/inference/v1/generate", "--body", asked]
            fpath, fspath = os.path.join(tmp, side + "-f.sock"), os.path.join(tmp, side + "-fs.sock")
            plain, tcp = floor(vllm), floor(vllm, *frames)
            rows = sides[side] = {
                FLOOR + "HTTP": (plain, [load], "http://%s/v1/completions" % plain.addr),
                BASE: (p, [load], "http://%s/v1/completions" % p.addr),
                ENGINE_API: (p, [load], "http://%s/v1/engine/generate" % p.addr),
                FLOOR + "unix": (floor(vllm, *frames, "--listen", "unix:" + fpath), [load], "unix://" + fpath),
                "socket, unix": (p, [load], "unix://" + path),
                FLOOR + "TCP": (tcp, [load], "tcp://" + tcp.addr),
                "socket, TCP": (p, [load], "tcp://127.0.0.1:%d" % port),
                FLOOR + "unix, SGLang": (floor(sglang, "--frames", "--path", "/generate", "--body", native, "--event", '"output_ids":[', "--listen", "unix:" + fspath), [load], "unix://" + fspath),
                "socket, unix, SGLang": (g, [load], "unix://" + gpath),
            }
            for name, flags in (("gRPC, encoding/json", []), ("gRPC, ids searched for", ["--scan"])):
                s = start(1, [grpc, "serve", "--engine", "http://" + vllm.addr, *flags], first_line=True)
                rows[name] = (s, [grpc, "load"], s.addr)
        names = [n for n in sides["item"] if n == BASE or not a.only or any(n.startswith(o) for o in a.only.split(","))]
        for n in list(sides["item"]):
            if n not in names and any(floor_of(o) == n for o in names):
                names.append(n)
        names.sort(key=list(sides["item"]).index)

        got = {n: {} for n in names}
        for round_ in range(a.rounds):
            print("round %d of %d" % (round_ + 1, a.rounds), file=sys.stderr)
            for side, streams, tokens, seconds in (("item", 200, 200, a.seconds), ("request", 64, 4, a.seconds / 2)):
                for name in names:
                    p, argv, target = sides[side][name]
                    put_load(argv, target, streams, tokens, 0.3)
                    before = times(p)
                    rep = put_load(argv, target, streams, tokens, seconds)
                    user, kernel, all_, sleeps = (x - y for x, y in zip(times(p), before))
                    user = all_ * user / max(user + kernel, 1)
                    n = rep["Items"] if side == "item" else rep["Requests"]
                    row = got[name]
                    row.setdefault(side, []).append(all_ / n * 1e6)
                    row.setdefault(side + " user", []).append(user / n * 1e6)
                    row.setdefault(side + " rate", []).append(n / rep["Seconds"])
                    row.setdefault(side + " sleeps", []).append(sleeps / n)
                    if side == "item" and "AllocsPerItem" in rep:
                        row.setdefault("allocs", []).append(rep["AllocsPerItem"])

        def ratio(name, key):
            r = [x / y for x, y in zip(got[name][key], got[BASE][key])]
            return "%.2f [%.2f–%.2f]" % (statistics.median(r), min(r), max(r))

        def beyond(name, key):
            floor = floor_of(name)
            return b.med([x - y for x, y in zip(got[name][key], got[floor][key])]) if floor else "–"

        lines = [
            "| way | item µs | of it user | kernel | sleeps an item | beyond the sockets | ratio to HTTP | items/s | request µs | beyond the sockets | ratio to HTTP | requests/s |",
            "| --- " * 12 + "|",
        ]
        for n in names:
            r = got[n]
            r["item kernel"] = [x - y for x, y in zip(r["item"], r["item user"])]
            lines.append("| " + " | ".join([
                n, b.med(r["item"]), b.med(r["item user"]), b.med(r["item kernel"]), b.med(r["item sleeps"], 3), beyond(n, "item"), ratio(n, "item"), b.med(r["item rate"], 0),
                b.med(r["request"], 0), beyond(n, "request"), ratio(n, "request"), b.med(r["request rate"], 0)]) + " |")
        lines += ["", "%d rounds of %.1f s and %.1f s%s. The Go client and the load on it allocated %s times an item (unix)." % (
            a.rounds, a.seconds, a.seconds / 2, a.note and "; " + a.note, "%.2f" % statistics.median(got.get("socket, unix", got[BASE])["allocs"]))]
        table = "\n".join(lines)
        print("\n" + table)
        if a.report:
            with open(a.report, encoding="utf-8") as f:
                page = f.read()
            if BEGIN not in page or END not in page:
                sys.exit("%s has no %s … %s" % (a.report, BEGIN, END))
            page = re.sub(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: BEGIN + "\n" + table + "\n" + END, page, flags=re.S)
            with open(a.report, "w", encoding="utf-8") as f:
                f.write(page)
    finally:
        for p in procs:
            p.stop()
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    main()
