#!/usr/bin/env python3
"""Measures native tokenization beside its goals.

The first part is a Go test (TestGoals of router/tokenize): a cold encoding, the next turn of
a long conversation, a short chat and the memory of many conversations, each beside Hugging
Face's `tokenizers` crate, which the same library contains, and beside an engine's /tokenize
that answers at once. Times are wall-clock time on one core; the table has the CPU too.

The memory alone, which does not depend on how busy the machine is, is --only memory.

The second part (alone with --only llmd) has the shape of llm-d's benchmark: prompts
of 100,000 tokens through the whole router to simulated engines, first all new, then with 95 %
of each as before, at the rate that this machine allows. It prints the router's CPU per
request and what 99 requests a second would take.

Vocabularies and templates are those of scripts/tokenizer_golden.py (ids, templates), which
downloads them once.

  scripts/bench_tokens.py [--rounds N] [--conversations N] [--only goals|memory|llmd] [--report FILE]

With --report the tables of each part that was measured replace those between its markers in
the page.
"""

import argparse
import glob
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLUICE = os.path.join(ROOT, "bin", "sluice")
CACHE = os.environ.get("SLUICE_CACHE", os.path.expanduser("~/.cache/sluice"))
TICK = os.sysconf("SC_CLK_TCK")
BEGIN, END = "<!-- bench-tokens %s -->", "<!-- /bench-tokens %s -->"
RATE = 99  # requests a second
PROMPT = 100_000  # tokens


def verdict(met):
    return "met" if met else "**not met**"


def span(low_high, digits=2):
    return "%.*f–%.*f" % (digits, low_high[0], digits, low_high[1])


def goals(a):
    """Runs the Go test and returns the rows of the first table and the tables behind it."""
    with tempfile.TemporaryDirectory(prefix="sluice-tokens-") as tmp:
        out = os.path.join(tmp, "figures.json")
        command = ["go", "test", "./router/tokenize", "-run", "^TestGoals$", "-count=1", "-timeout", "30m", "-args",
                   "-goals", out, "-goals.rounds", str(a.rounds), "-goals.conversations", str(a.conversations), "-goals.memory=%s" % ("true" if a.only == "memory" else "false")]
        env = dict(os.environ, GOMAXPROCS=os.environ.get("GOMAXPROCS", "2"))
        env.setdefault("SLUICE_TOKENIZER_LIBRARY", os.path.join(ROOT, "bin", "libsluice_tokenizer.so"))
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(run.stdout[-4000:] + run.stderr[-4000:])
        with open(out, encoding="utf-8") as f:
            g = json.load(f)
    rows = []
    for name, c in g["cold"].items():
        rows.append(("cold encoding of 300 KB, %s (%s), ratio to HF" % (name, c["encoder"]), "at most 0.5", "%.2f [%s]" % (c["Ratio"], span(c["LowHigh"])), c["Ratio"] <= 0.5))
    for name, t in g["turns"].items():
        rows.append(("next turn, %d old and %d new tokens, template %s, ms" % (t["Tokens"] - t["NewTokens"], t["NewTokens"], name), "at most 0.5",
                     "%.2f [%s]" % (t["Wall"] / 1e3, span([v / 1e3 for v in t["LowHigh"]])), t["Wall"] <= 500))
    if c := g["chat"]:
        rows.append(("new chat of 1 KB, µs", "at most 60", "%.0f [%s]" % (c["Wall"], span(c["LowHigh"], 0)), c["Wall"] <= 60))
    m = g["memory"]
    rows.append(("conversations of %d tokens kept in 384 MiB" % m["Tokens"], "1,000", "%d of %d, in %d MiB (heap %d MiB)" % (
        m["Kept"], m["Conversations"], m["CacheBytes"] >> 20, m["Heap"] >> 20), m["Kept"] >= min(1000, a.conversations) and m["Heap"] <= 384 << 20))
    e = g["engine"]
    if not e:
        return rows, [], g["library"]
    detail = ["| prompt | native | CPU | HF: template and whole encoding | `/tokenize` of an instant engine | CPU with that engine's |", "| --- | --- | --- | --- | --- | --- |"]
    detail.append("| new chat of 1 KB, µs | %.0f | %.0f | %.0f | %.0f | %.0f |" % (c["Wall"], c["CPU"], c["HF"], e["ShortWall"], e["ShortCPU"]))
    for name, t in g["turns"].items():
        detail.append("| next turn of %d tokens, %s, µs | %.0f | %.0f | %.0f | %.0f | %.0f |" % (t["Tokens"], name, t["Wall"], t["CPU"], t["HF"], e["LongWall"], e["LongCPU"]))
        detail.append("| the same, nothing cached, µs | %.0f | | %.0f | %.0f | %.0f |" % (t["Cold"], t["HF"], e["LongWall"], e["LongCPU"]))
    parts = ["| part of a turn, µs | " + " | ".join(g["turns"]) + " |", "| --- |" + " --- |" * len(g["turns"])]
    for title, f in (
        ("body to the template's input", lambda t: t["Convert"]), ("template, with the hand-over to the library's thread", lambda t: t["Render"]),
        ("encoding of what is new", lambda t: t["EncodeTail"]), ("comparison with the cache, ids and hashes (the rest)", lambda t: t["Wall"] - t["Convert"] - t["Render"] - t["EncodeTail"]),
        ("*in all*", lambda t: t["Wall"]), ("not needed: the hashes of all blocks", lambda t: t["AllBlocks"]),
    ):
        parts.append("| %s | " % title + " | ".join("%.0f" % f(t) for t in g["turns"].values()) + " |")
    return rows, [detail, parts], g["library"]


# The shape of llm-d's benchmark.


class Child:
    def __init__(self, argv, first_line=False, env=None):
        self.err = tempfile.TemporaryFile()
        self.p = subprocess.Popen(argv, stdout=subprocess.PIPE if first_line else subprocess.DEVNULL, stderr=self.err, text=True, env=env)
        self.addr = self.p.stdout.readline().strip() if first_line else None
        if first_line and not self.addr:
            self.err.seek(0)
            sys.exit("%s did not start: %s" % (argv[:2], self.err.read().decode(errors="replace")[-2000:]))

    def cpu(self):
        with open("/proc/%d/stat" % self.p.pid) as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def peak_mib(self):
        with open("/proc/%d/status" % self.p.pid) as f:
            return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) / 1024

    def stop(self):
        self.p.terminate()
        try:
            self.p.wait(10)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()


def paragraphs():
    found = []
    for pattern in ("docs/*.md", "router/*/*.go", "scripts/*.py"):
        for name in sorted(glob.glob(os.path.join(ROOT, pattern))):
            with open(name, encoding="utf-8") as f:
                found += [p for p in f.read().split("\n\n") if 40 < len(p) < 4000]
    return found


class Prompts:
    """Conversations of an agent: many messages, a growing end."""

    def __init__(self, seed, bytes_per_token):
        self.random, self.paragraphs, self.per_token = random.Random(seed), paragraphs(), bytes_per_token
        self.n = 0

    def text(self, size):
        parts, have = [], 0
        while have < size:
            p = self.random.choice(self.paragraphs)
            parts.append(p)
            have += len(p.encode())
        return "\n\n".join(parts)

    def messages(self, tokens):
        self.n += 1
        out, have = [{"role": "system", "content": "Conversation %d of %d. " % (self.n, self.random.getrandbits(60)) + self.text(12_000)}], 12_000
        while have < tokens * self.per_token:
            size = self.random.randrange(500, 7500)
            out.append({"role": ("user", "assistant")[len(out) % 2 == 0], "content": self.text(size)})
            have += size + 500
        return out

    def more(self, messages, tokens):
        """The next turn: its end is new, and as much of the middle is left out, so that prompts stay as long."""
        return messages + [{"role": "user", "content": self.text(int(tokens * self.per_token))}]


def body_of(messages):
    return json.dumps({"model": "sim", "messages": messages, "max_tokens": 1}, ensure_ascii=False).encode()


def send_all(addr, bodies, connections):
    """Sends bodies over so many connections, each one request at a time."""
    lock, left, failed = threading.Lock(), list(reversed(bodies)), []

    def run():
        c = http.client.HTTPConnection(addr, timeout=60)
        while True:
            with lock:
                if not left:
                    return
                body = left.pop()
            c.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            r = c.getresponse()
            answer = r.read()
            if r.status != 200:
                failed.append("%d %s" % (r.status, answer[:300]))

    threads = [threading.Thread(target=run) for _ in range(connections)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        sys.exit("%d requests failed: %s" % (len(failed), failed[0]))


def counters(addr):
    c = http.client.HTTPConnection(addr, timeout=10)
    c.request("GET", "/metrics")
    text = c.getresponse().read().decode()
    out = {}
    for line in text.splitlines():
        m = re.match(r"(sluice_\w+(?:\{[^}]*\})?) ([0-9.e+]+)$", line)
        if m:
            out[m.group(1)] = float(m.group(2))
    return out


def llmd(a):
    folder = os.path.join(CACHE, "tokenizer", "vocab", "qwen2")
    if not os.path.exists(folder):
        sys.exit("%s is missing; scripts/tokenizer_golden.py ids makes it" % folder)
    children = []
    with tempfile.TemporaryDirectory(prefix="sluice-tokens-") as tmp:
        try:
            sim = [SLUICE, "sim", "--records", "-1", "--speed", "inf", "--blocks", "262144", "--max-model-len", "262144", "--no-tokenize"]
            if a.kv_events == "off":
                sim += ["--kv-events", "off"]
            flags = []
            for _ in range(a.engines):
                s = Child(sim, first_line=True)
                children.append(s)
                flags += ["--engine", "http://" + s.addr.removeprefix("http://") + (",kv_events=off" if a.kv_events == "off" else "")]
            config = os.path.join(tmp, "sluice.yaml")
            with open(config, "w", encoding="utf-8") as f:
                f.write("models:\n  sim:\n    tokenizer: %s\ntokens:\n  timeout: 10s\n  cache_bytes: 384MiB\n" % folder)
            router = Child([SLUICE, "serve", "--config", config, "--listen", "127.0.0.1:0", "--admin", "off", "--log-level", "warn", *flags], first_line=True)
            children.append(router)
            deadline = time.time() + 60
            while not any(k.startswith('sluice_tokenizer_native_models{state="used"') and v > 0 for k, v in counters(router.addr).items()):
                if time.time() > deadline:
                    sys.exit("the router has not loaded the tokenizer")
                time.sleep(0.2)
            results = []
            per_token = a.bytes_per_token
            for round_ in range(a.llmd_rounds):
                prompts = Prompts(100 + round_, per_token)
                first = [prompts.messages(PROMPT) for _ in range(a.prompts)]
                old = [prompts.messages(int(PROMPT * 0.95)) for _ in range(a.prompts)]
                turns = [prompts.more(m, PROMPT * 0.05) for m in old]
                send_all(router.addr, [body_of(m) for m in old], a.connections)  # what repeats
                for name, bodies in (("nothing repeats", [body_of(m) for m in first]), ("95 % repeat", [body_of(m) for m in turns])):
                    before, cpu, began = counters(router.addr), router.cpu(), time.time()
                    send_all(router.addr, bodies, a.connections)
                    took = time.time() - began
                    spent = router.cpu() - cpu
                    after = counters(router.addr)
                    grown = lambda k: after.get(k, 0) - before.get(k, 0)  # noqa: E731
                    n = len(bodies)
                    tokens = grown("sluice_cache_prompt_tokens_total") / n
                    if grown('sluice_prompts_total{source="native"}') != n:
                        sys.exit("not all prompts were tokenized natively: %s" % {k: v for k, v in after.items() if k.startswith("sluice_prompts_total")})
                    results.append((name, spent / n * 1e3, tokens, grown("sluice_tokenizer_native_cached_tokens_total") / n / max(tokens, 1), n / took, len(bodies[0])))
            rss = router.peak_mib()
        finally:
            for c in reversed(children):
                c.stop()
    rows = []
    for name, goal in (("nothing repeats", 1.5), ("95 % repeat", 1.0)):
        mine = [r for r in results if r[0] == name]
        cores = [r[1] * RATE / 1e3 for r in mine]
        tokens, cached, rate = (statistics.median(r[i] for r in mine) for i in (2, 3, 4))
        rows.append(("%d requests/s of %.0f tokens, %s (%.0f %% of the ids cached, measured at %.0f/s), cores" % (RATE, tokens, name, cached * 100, rate), "at most %.1f" % goal,
                     "%.2f [%s]; %.1f ms each" % (statistics.median(cores), span([min(cores), max(cores)]), statistics.median(r[1] for r in mine)), statistics.median(cores) <= goal))
    rows.append(("resident memory of that router at its peak, MiB", "below 1,024", "%.0f" % rss, rss < 1024))
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=9, help="rounds of each measurement [9]")
    p.add_argument("--conversations", type=int, default=1000, help="conversations to keep in memory [1000]")
    p.add_argument("--only", choices=("goals", "memory", "llmd"), help="one part")
    p.add_argument("--engines", type=int, default=4, help="llmd: simulated engines [4]")
    p.add_argument("--prompts", type=int, default=40, help="llmd: prompts of each kind in a round [40]")
    p.add_argument("--llmd-rounds", type=int, default=3, help="llmd: rounds [3]")
    p.add_argument("--connections", type=int, default=2, help="llmd: connections of the load [2]")
    p.add_argument("--bytes-per-token", type=float, default=3.3, help="llmd: of the text, to make prompts of the wanted length [3.3]")
    p.add_argument("--kv-events", choices=("on", "off"), default="off", help="llmd: whether engines report their caches, whose ids are not those of the vocabulary [off]")
    p.add_argument("--report", metavar="FILE", help="write the tables between the markers of this page")
    a = p.parse_args()
    if not os.path.exists(SLUICE):
        sys.exit("bin/sluice is not built; run: make build")
    if a.report and a.only == "memory":
        sys.exit("--only memory writes no report; its row is one of --only goals")
    if a.only != "llmd":
        began = time.time()
        rows, tables, library = goals(a)
        show("goals", a.report, rows, tables, "%d rounds" % a.rounds, time.time() - began, "; library " + library)
    if a.only not in ("goals", "memory"):
        began = time.time()
        show("llmd", a.report, llmd(a), [], "%d rounds of %d prompts" % (a.llmd_rounds, a.prompts), time.time() - began)


def show(part, report, rows, tables, rounds, took, more=""):
    """Prints the tables of a part, and writes them to the page."""
    lines = ["| what | goal | measured | |", "| --- | --- | --- | --- |"] + ["| %s | %s | %s | %s |" % (what, goal, got, verdict(met)) for what, goal, got, met in rows]
    for t in tables:
        lines += [""] + t
    lines += ["", "%s in %.0f s on %d cores, median [range]; load average %.1f at the end%s." % (rounds, took, os.cpu_count(), os.getloadavg()[0], more)]
    text = "\n".join(lines)
    print(text, flush=True)
    if not report:
        return
    begin, end = BEGIN % part, END % part
    with open(report, encoding="utf-8") as f:
        page = f.read()
    if begin not in page or end not in page:
        sys.exit("%s has no %s … %s" % (report, begin, end))
    page = re.sub(re.escape(begin) + ".*" + re.escape(end), lambda _: begin + "\n" + text + "\n" + end, page, flags=re.S)
    with open(report, "w", encoding="utf-8") as f:
        f.write(page)


if __name__ == "__main__":
    main()
