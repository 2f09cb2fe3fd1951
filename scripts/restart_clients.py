#!/usr/bin/env python3
"""Tests that hot restarts of a router lose no POST of clients that keep their connections.

Clients (requests, httpx, the openai package and curl) send POST requests at random intervals
over their connection pools while the router restarts many times. Retries are disabled in
every client that supports them. The exit status is 1 if a request was lost.

  scripts/restart_clients.py [--restarts N] [--every SECONDS] [--clients N] [--pause SECONDS]

The script needs bin/sluice, curl, and Python with requests, httpx and openai.
"""

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import httpx
import openai
import requests

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLUICE = os.path.join(ROOT, "bin", "sluice")
BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}


def start(env, *argv):
    p = subprocess.Popen([SLUICE, *argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    addr = p.stdout.readline().strip()
    if not addr:
        sys.exit("%s did not start" % " ".join(argv))
    return p, addr


def with_requests(url):
    session = requests.Session()

    def post():
        session.post(url + "/v1/chat/completions", json=BODY, timeout=30).raise_for_status()

    return post


def with_httpx(url):
    client = httpx.Client(timeout=30, limits=httpx.Limits(keepalive_expiry=None))

    def post():
        client.post(url + "/v1/chat/completions", json=BODY).raise_for_status()

    return post


def with_openai(url):
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=30)

    def post():
        client.chat.completions.create(**BODY)

    return post


def curl(url, stop, pause, count, lost):
    """Runs curl, which keeps the connection for the URLs of one command line and waits between them."""
    one = ["-s", "-o", "/dev/null", "-w", "%{http_code}\n", "-X", "POST", "-H", "Content-Type: application/json", "--retry", "0", "-d",
           '{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":4}', url + "/v1/chat/completions"]
    while not stop.is_set():
        n = 10
        out = subprocess.run(["curl", "--rate", "%d/m" % max(1, int(120 / pause))] + sum(([*one, "--next"] for _ in range(n - 1)), []) + one, capture_output=True, text=True)
        codes = out.stdout.split()
        count["curl"] += n
        if codes != ["200"] * n or out.returncode != 0:
            lost.append(("curl", "exit status %d, %s" % (out.returncode, codes)))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--restarts", type=int, default=10)
    ap.add_argument("--every", type=float, default=12.0)
    ap.add_argument("--clients", type=int, default=60, help="number of clients of all kinds together")
    ap.add_argument("--pause", type=float, default=4.0, help="longest pause between two POST requests of a client, in seconds")
    a = ap.parse_args()
    tmp = tempfile.TemporaryDirectory()
    env = dict(os.environ, XDG_RUNTIME_DIR=tmp.name)
    sim, engine = start(env, "sim")
    first, addr = start(env, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--engine", "http://" + engine)
    url, stop, lost, count = "http://" + addr, threading.Event(), [], collections.Counter()
    while True:
        try:
            urllib.request.urlopen(url + "/readyz").close()
            break
        except OSError:
            time.sleep(0.05)

    def run(kind, post):
        while not stop.is_set():
            try:
                post()
            except Exception as e:  # clients have different exceptions for a lost POST
                lost.append((kind, repr(e)))
            count[kind] += 1
            stop.wait(random.random() * a.pause)

    makers = [("requests", with_requests), ("httpx", with_httpx), ("openai", with_openai)]
    threads = [threading.Thread(target=run, args=(makers[i % 3][0], makers[i % 3][1](url))) for i in range(a.clients)]
    threads += [threading.Thread(target=curl, args=(url, stop, a.pause, count, lost)) for _ in range(4)]
    for t in threads:
        t.start()
    pid = first.pid
    try:
        for _ in range(a.restarts):
            time.sleep(a.every * (0.5 + random.random()))
            reported = subprocess.run([SLUICE, "restart"], env=env, capture_output=True, text=True, check=True).stdout
            pid = int(reported.split()[1])
    finally:
        stop.set()
        for t in threads:
            t.join()
        for p in {pid, sim.pid}:
            os.kill(p, signal.SIGTERM)
        first.wait()
    print("%d restarts, %d POSTs (%s), %d lost" % (a.restarts, sum(count.values()), ", ".join("%s %d" % kv for kv in sorted(count.items())), len(lost)))
    for kind, what in lost[:10]:
        print("lost: %s: %s" % (kind, what))
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
