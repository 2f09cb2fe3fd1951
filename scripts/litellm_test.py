#!/usr/bin/env python3
"""Runs the LiteLLM proxy as docs/litellm.md says, in front of a router with an API key over a simulated engine.

  scripts/litellm_test.py

The configuration and the request are those of the page, with the addresses of this run. LiteLLM comes from the
Python package index, once. Its list of prices is the one that it contains, so that it needs no network.
"""
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE = os.environ.get("SLUICE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sluice")
VERSION = "1.108.7"
MASTER_KEY = "sk-of-this-test"
failed = False


def check(what, ok, reported=""):
    global failed
    print(("ok    " if ok else "FAIL  ") + what, flush=True)
    if not ok:
        failed = True
        print("      " + str(reported).strip()[-3000:].replace("\n", "\n      "), flush=True)
    return ok


def installed():
    """Returns the folder of the environment, which it makes once."""
    folder = os.path.join(CACHE, "litellm-" + VERSION)
    mark = os.path.join(folder, "complete")
    if not os.path.exists(mark):
        print("litellm_test: installing litellm (once)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        python = os.path.join(folder, "bin/python")
        # pip takes minutes to choose among the versions of so many packages.
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv<1"], check=True)
        subprocess.run([os.path.join(folder, "bin/uv"), "pip", "install", "-q", "--python", python, "litellm[proxy]==" + VERSION], check=True)
        open(mark, "w", encoding="utf-8").close()
    return folder


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def page():
    """Returns the page's configuration, its command that starts the proxy, and its request."""
    with open(os.path.join(ROOT, "docs/litellm.md"), encoding="utf-8") as f:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", f.read(), flags=re.M | re.S)
    lines = "".join(text for language, text in blocks if not language).replace("\\\n", " ").splitlines()

    def command(first):
        return next(line for line in lines if line.startswith(first))

    return next(text for language, text in blocks if language == "yaml"), command("litellm "), command("curl ")


def get(url):
    with urllib.request.urlopen(url, timeout=5) as r:
        return r.read().decode()


def main():
    folder = installed()
    config, proxy, request = page()
    work = tempfile.TemporaryDirectory(prefix="sluice-litellm.")
    processes = []
    sluice = os.path.join(ROOT, "bin/sluice")

    def start(name, *command, **environment):
        """Starts a command; returns it, and the first line that one of sluice prints."""
        log = open(os.path.join(work.name, name + ".log"), "w", encoding="utf-8")
        process = subprocess.Popen(command, stdout=subprocess.PIPE if command[0] == sluice else log, stderr=log, cwd=work.name, text=True, start_new_session=True, env={**os.environ, **environment})
        processes.append(process)
        return process, process.stdout.readline().strip() if process.stdout else ""

    def curl(words):
        """Runs the page's request and returns the heads and the body."""
        done = subprocess.run([*words, "-sS", "--max-time", "60"], capture_output=True, text=True, errors="replace")
        head, _, body = done.stdout.partition("\n\n") if "\r\n" not in done.stdout else done.stdout.partition("\r\n\r\n")
        return head, body + done.stderr

    try:
        _, engine = start("sim", sluice, "sim", "--model", "my-model", "--speed", "20")
        key = json.loads(subprocess.run([sluice, "key", "--name", "litellm", "--json"], capture_output=True, text=True, check=True).stdout)
        with open(os.path.join(work.name, "sluice.yaml"), "w", encoding="utf-8") as f:
            f.write(f"listen: 127.0.0.1:0\nadmin: {{listen: 'off'}}\nworkers: [{{url: 'http://{engine}'}}]\napi_keys: [{{name: litellm, sha256: {key['sha256']}}}]\n")
        _, router = start("router", sluice, "serve", "--config", os.path.join(work.name, "sluice.yaml"))
        with open(os.path.join(work.name, "litellm.yaml"), "w", encoding="utf-8") as f:
            f.write(config.replace("127.0.0.1:8080", router))
        port = str(free_port())
        words = shlex.split(proxy.replace("4000", port))
        began = time.monotonic()
        server, _ = start("litellm", os.path.join(folder, "bin/python"), os.path.join(folder, "bin", words[0]), *words[1:], SLUICE_API_KEY=key["key"], LITELLM_MASTER_KEY=MASTER_KEY,
                          LITELLM_LOCAL_MODEL_COST_MAP="True", NO_PROXY="127.0.0.1", PYTHONUNBUFFERED="1")
        while True:
            try:
                get(f"http://127.0.0.1:{port}/health/liveliness")
                break
            except OSError:
                if server.poll() is not None or time.monotonic() - began > 180:
                    with open(os.path.join(work.name, "litellm.log"), encoding="utf-8", errors="replace") as f:
                        check("the proxy starts", False, f.read())
                    sys.exit("litellm_test: failed")
                time.sleep(0.5)
        check(f"LiteLLM {VERSION} starts with the page's configuration, in {time.monotonic() - began:.0f} s", True)
        words = shlex.split(request.replace("4000", port).replace("$LITELLM_MASTER_KEY", MASTER_KEY))
        head, body = curl(words)
        check("the page's request is answered", " 200 " in head.split("\n")[0] + " " and '"content"' in body, head + "\n" + body)
        for header in ("llm_provider-x-sluice-worker", "llm_provider-x-request-id"):
            check(f"the answer has the header {header}", re.search(rf"^{header}: \S", head, flags=re.M | re.I), head)
        head, body = curl([w.replace('"max_tokens": 8', '"max_tokens": 8, "stream": true') for w in words])
        check("a streamed request ends with [DONE]", body.count("data: ") > 4 and body.rstrip().endswith("data: [DONE]"), head + "\n" + body)
        counted = sum(float(v) for v in re.findall(r'^sluice_api_key_requests_total\{[^}]*key="litellm"[^}]*\} ([\d.e+]+)$', get(f"http://{router}/metrics"), flags=re.M))
        check(f"the router counts them for the key litellm: {counted:.0f}", counted == 2, "")
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        for process in processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        work.cleanup()
    if failed:
        sys.exit("litellm_test: some checks failed")
    print("litellm_test: all checks passed")


if __name__ == "__main__":
    main()
