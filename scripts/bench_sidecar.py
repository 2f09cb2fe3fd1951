#!/usr/bin/env python3
"""Measures the latency that a sidecar adds, its CPU and its memory.

The script sends the same requests alternately to simulated engines directly and through
bin/sluice sidecar, so that both run under the same conditions. It prints a table of the
differences of these pairs, then the memory.

For direct P/D requests this client sends both legs itself, one after the other, as the
sidecar does, so the difference is the sidecar's own cost. It sends one request at a time.

CPU by length of the prompt is measured in alternation with two relays in C that only pass
bytes on (bench/relay/raw for one leg, bench/relay/legs for two), the lower bound for a copy
through user space on this machine, and with other builds (--binary).

  scripts/bench_sidecar.py [--rounds N] [--turns N] [--only cpu|memory] [--nixl LIBRARY] [--binary NAME=PATH]
"""

import argparse
import http.server
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

from bench_proxies import free_port

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLUICE = os.path.join(ROOT, "bin", "sluice")


class Process:
    def __init__(self, *argv, binary=SLUICE, addr=None):
        self.p = subprocess.Popen([binary, *argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addr = addr or self.p.stdout.readline().strip()
        if not self.addr:
            sys.exit("%s did not start" % " ".join(argv))

    def cpu(self):
        """Returns the CPU time of all threads in µs."""
        total = 0
        for t in os.listdir("/proc/%d/task" % self.p.pid):
            with open("/proc/%d/task/%s/schedstat" % (self.p.pid, t)) as f:
                total += int(f.read().split()[0])
        return total / 1000

    def memory(self):
        """Returns the MiB of RSS, PSS and anonymous pages."""
        with open("/proc/%d/smaps_rollup" % self.p.pid) as f:
            text = f.read()
        return [int(re.search(r"^%s:\s+(\d+)" % k, text, re.M).group(1)) / 1024 for k in ("Rss", "Pss", "Anonymous")]

    def stop(self):
        self.p.send_signal(signal.SIGTERM)
        self.p.wait(20)


class Client:
    """One keep-alive connection with as little overhead as Python allows."""

    def __init__(self, addr):
        host, port = addr.rsplit(":", 1)
        self.s = socket.create_connection((host, int(port)), 10)
        self.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, body, headers=b""):
        msg = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body)
        began = time.perf_counter()
        self.s.sendall(msg)
        got = self.s.recv(65536)
        while b"\r\n\r\n" not in got:
            got += self.s.recv(65536)
        head, rest = got.split(b"\r\n\r\n", 1)
        n = int(re.search(rb"(?i)\r\ncontent-length: (\d+)", head).group(1))
        while len(rest) < n:
            rest += self.s.recv(65536)
        took = time.perf_counter() - began
        if not head.startswith(b"HTTP/1.1 200"):
            sys.exit("%s\n%s" % (head.decode(), rest.decode()))
        return took * 1e6, head, rest


class Sink(http.server.BaseHTTPRequestHandler):
    """An engine that reads a body, computes nothing, and returns a handle if the request asks for one."""

    protocol_version, wbufsize = "HTTP/1.1", -1
    answer = {"id": "x", "object": "text_completion", "model": "sim", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
              "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
    given = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "127.0.0.1",
              "remote_port": 1, "remote_request_id": "r", "tp_size": 1}

    def reply(self, body):
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "sim", "object": "model"}]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(dict(self.answer, kv_transfer_params=self.given) if b'"do_remote_decode":true' in body else self.answer)

    def log_message(self, *_):
        pass


def sink():
    """Runs a Sink in a process of its own and returns its address and process."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    server.daemon_threads = True
    p = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    p.start()
    return "127.0.0.1:%d" % server.server_address[1], p


def wait_ready(addr):
    for _ in range(300):
        try:
            with urllib.request.urlopen("http://%s/readyz" % addr, timeout=2):
                return
        except OSError:
            time.sleep(0.05)
    sys.exit("the sidecar is not ready")


def body(kb, i, extra=b""):
    text = (b"%08d" % i + b"lorem ipsum dolor sit amet " * (kb * 1024 // 27 + 1))[: kb * 1024]
    return b'{"model":"sim","seed":9007199254740993,"prompt":"%s","max_tokens":%s}' % (text, extra)


SIDECAR = ["sidecar", "--listen", "127.0.0.1:0", "--log-level", "error", "--prefill-networks", "127.0.0.0/8", "--engine"]
LENGTHS, REQUESTS = (1, 64, 256), 30  # prompt sizes in KB; requests of each size per turn


def relay(start, tmp, name, *engines):
    """Starts a relay in C in front of engines on loopback and returns its process."""
    binary, port = os.path.join(tmp, name), free_port()
    if not os.path.exists(binary):
        subprocess.run(["cc", "-O2", "-o", binary, os.path.join(ROOT, "bench/relay", name, name + ".c")], check=True)
    p = start(str(port), *(e.rsplit(":", 1)[1] for e in engines), binary=binary, addr="127.0.0.1:%d" % port)
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return p
        except OSError:
            time.sleep(0.05)
    sys.exit(name + " does not listen")


def by_length(a, start, tmp):
    """Prints the CPU per request by length of the prompt; the processes are measured in alternation."""
    at, _ = sink()
    named = b"x-prefiller-host-port: %s\r\n" % at.encode()
    rows = []  # request, proxy, process, header
    for request, header, least in (("decode only", b"", ("raw", at)), ("P/D", named, ("legs", at, at))):
        for name, binary in [("sidecar", SLUICE), *(b.split("=", 1) for b in a.binary)]:
            p = start(*SIDECAR, "http://" + at, binary=binary)
            wait_ready(p.addr)
            rows.append((request, name, p, header))
        if shutil.which("cc"):
            rows.append((request, "relay in C", relay(start, tmp, *least), b""))
    to = [Client(p.addr) for _, _, p, _ in rows]
    took = [{kb: [] for kb in LENGTHS} for _ in rows]
    for turn in range(a.turns + 1):
        for kb in LENGTHS:
            for i, (_, _, p, header) in enumerate(rows):
                before = p.cpu()
                for n in range(REQUESTS):
                    to[i].post(body(kb, n, b"1"), header)
                if turn > 0:  # the first turn is a warm-up
                    took[i][kb].append((p.cpu() - before) / REQUESTS)
    print("\nCPU µs per request, kernel included, in front of an engine that only reads; a P/D request sends its prompt twice. Medians of %d turns [quartiles].\n" % a.turns)
    print("| request | by | %s | per KB of prompt |" % " | ".join("%d KB" % kb for kb in LENGTHS))
    print("| --- | --- |%s --- |" % (" --- |" * len(LENGTHS)))
    for (request, name, _, _), t in zip(rows, took):
        per = [(x - y) / (LENGTHS[-1] - LENGTHS[0]) for x, y in zip(t[LENGTHS[-1]], t[LENGTHS[0]])]
        q = statistics.quantiles(per, n=4)
        print("| %s | %s | %s | %.2f [%.2f–%.2f] |" % (request, name, " | ".join("%.0f" % statistics.median(t[kb]) for kb in LENGTHS), q[1], q[0], q[2]))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=1500, help="request pairs for each row of small prompts")
    ap.add_argument("--turns", type=int, default=20, help="rounds of the measurement of CPU by prompt length")
    ap.add_argument("--only", choices=["cpu", "memory"], help="measure only the CPU by prompt length, or the memory")
    ap.add_argument("--binary", action="append", default=[], metavar="NAME=PATH", help="another build whose CPU and memory are also measured; can be repeated")
    ap.add_argument("--nixl", help="path of libnixl_capi.so, to measure the memory of a sidecar with a NIXL agent as well")
    a = ap.parse_args()
    if not os.path.exists(SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    load = os.getloadavg()[0]
    sim = ["sim", "--kv-events", "off", "--records", "-1", "--speed", "inf", "--blocks", "65536", "--cost-admit", "-1ns"]
    procs, tmp = [], tempfile.mkdtemp(prefix="sluice-sidecar-")

    def start(*argv, **kw):
        procs.append(Process(*argv, **kw))
        return procs[-1]

    try:
        pre, dec, whole = start(*sim, "--role", "prefill"), start(*sim, "--role", "decode"), start(*sim)
        flags = SIDECAR
        plain, pd = start(*flags, "http://" + whole.addr), start(*flags, "http://" + dec.addr)
        for s in (plain, pd):
            wait_ready(s.addr)
        c = {p: Client(p.addr) for p in (pre, dec, whole, plain, pd)}
        named = b"x-prefiller-host-port: %s\r\n" % pre.addr.encode()

        def pair_plain(kb, i):
            text = body(kb, i, b"1")
            turns = [lambda: c[whole].post(text)[0], lambda: c[plain].post(text)[0]]
            if i % 2:  # alternate the order, because the second request finds warm caches
                turns.reverse()
            t = [f() for f in turns]
            return t[::-1] if i % 2 else t

        def both_legs(kb, i):
            ask = b'1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}'
            t1, _, answer = c[pre].post(body(kb, i, ask))
            handle = json.dumps(json.loads(answer)["kv_transfer_params"]).encode()
            t2, _, _ = c[dec].post(body(kb, i, b'2,"kv_transfer_params":%s' % handle))
            return t1 + t2

        def through(kb, i):
            t, head, _ = c[pd].post(body(kb, i, b"2"), named)
            if b"X-Sluice-Prefill-Worker" not in head:
                sys.exit("a request had no prefill leg")
            return t

        def pair_pd(kb, i):
            if i % 2:
                t = through(kb, i)
                return both_legs(kb, i), t
            return both_legs(kb, i), through(kb, i)

        print("Load average %.1f on %d cores." % (load, os.cpu_count()))
        if not a.only:
            print("µs; median of the pairs' differences [quartiles].\n\n| request | pairs | direct p50 | sidecar p50 | added p50 |\n| --- | --- | --- | --- | --- |")
        for name, pair in (("decode only", pair_plain), ("P/D", pair_pd)) if not a.only else ():
            for kb, n in ((1, a.rounds), (64, a.rounds // 5)):
                for i in range(20):
                    pair(kb, i)
                got = [pair(kb, i) for i in range(n)]
                added = [y - x for x, y in got]
                q = statistics.quantiles(added, n=4)
                print("| %s, %d KB | %d | %.0f | %.0f | %.0f [%.0f–%.0f] |" % (
                    name, kb, n, statistics.median(x for x, _ in got), statistics.median(y for _, y in got), q[1], q[0], q[2]))

        if a.only != "memory":
            by_length(a, start, tmp)
        if a.only == "cpu":
            return
        print("\nMemory in MiB, medians of 3 processes, at rest and after 1,000 requests, half of them P/D.\n")
        print("| binary | NIXL | file, MB | RSS at rest | RSS after 1,000 requests | of it anonymous |")
        print("| --- | --- | --- | --- | --- | --- |")
        kinds = [("no", [])]
        if a.nixl:
            kinds.append(("an agent", ["--set", "transfers.nixl=on", "--set", "transfers.nixl_library=" + a.nixl]))
        for name, path in [("bin/sluice", SLUICE)] + [one.split("=", 1) for one in a.binary]:
            for nixl, more in kinds:
                got = []
                for _ in range(3):
                    s = start(*flags, "http://" + dec.addr, *more, binary=path)
                    wait_ready(s.addr)
                    rest, at = s.memory()[0], Client(s.addr)
                    for i in range(1000):
                        at.post(body(1 + i % 8, i, b"2"), named if i % 2 else b"")
                    rss, _, anonymous = s.memory()
                    got.append((rest, rss, anonymous))
                    procs.pop().stop()
                print("| %s | %s | %.1f | %.1f | %.1f | %.1f |" % (name, nixl, os.path.getsize(path) / 1e6, *(statistics.median(x) for x in zip(*got))))
    finally:
        for p in procs:
            p.stop()
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    main()
