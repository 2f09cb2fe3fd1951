#!/usr/bin/env python3
"""Runs Open WebUI as docs/open-webui.md says, against a router with an API key over a simulated engine.

  scripts/open_webui_test.py

Open WebUI comes from the Python package index (3 GB, once). The test signs its first user in, looks for the router's
model and sends one chat, whole and streamed, through Open WebUI's own API.
"""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE = os.environ.get("SLUICE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sluice")
VERSION = "0.12.4"
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
    folder = os.path.join(CACHE, "open-webui-" + VERSION)
    mark = os.path.join(folder, "complete")
    if not os.path.exists(mark):
        print("open_webui_test: installing open-webui (once)", file=sys.stderr, flush=True)
        subprocess.run(["python3", "-m", "venv", "--clear", folder], check=True)
        python = os.path.join(folder, "bin/python")
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv<1"], check=True)
        # Libraries for a GPU, which Open WebUI uses for embeddings of documents alone.
        overrides = os.path.join(folder, "overrides.txt")
        with open(overrides, "w", encoding="utf-8") as f:
            f.write("".join(f"{name}; sys_platform == 'never'\n" for name in OMITTED))
        subprocess.run([os.path.join(folder, "bin/uv"), "pip", "install", "-q", "--python", python, "--override", overrides, "open-webui==" + VERSION], check=True)
        open(mark, "w", encoding="utf-8").close()
    return folder


OMITTED = ("torch", "torchvision", "sentence-transformers", "transformers", "accelerate", "onnxruntime", "rapidocr-onnxruntime", "faster-whisper", "colbert-ai", "opencv-python-headless", "ctranslate2")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(url, body=None, token=None, timeout=30):
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = "Bearer " + token
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body is not None else None, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout) as r:
        return r.read().decode()


def main():
    folder = installed()
    work = tempfile.TemporaryDirectory(prefix="sluice-open-webui.")
    processes = []
    sluice = os.path.join(ROOT, "bin/sluice")

    def start(name, *command, **environment):
        log = open(os.path.join(work.name, name + ".log"), "w", encoding="utf-8")
        process = subprocess.Popen(command, stdout=subprocess.PIPE if name != "open-webui" else log, stderr=log, cwd=work.name, text=True, start_new_session=True, env={**os.environ, **environment})
        processes.append(process)
        return process.stdout.readline().strip() if process.stdout else process

    try:
        engine = start("sim", sluice, "sim", "--model", "my-model", "--speed", "20")
        key = json.loads(subprocess.run([sluice, "key", "--name", "open-webui", "--json"], capture_output=True, text=True, check=True).stdout)
        with open(os.path.join(work.name, "sluice.yaml"), "w", encoding="utf-8") as f:
            f.write(f"listen: 127.0.0.1:0\nadmin: {{listen: 'off'}}\nworkers: [{{url: 'http://{engine}'}}]\napi_keys: [{{name: open-webui, sha256: {key['sha256']}}}]\n")
        router = "http://" + start("router", sluice, "serve", "--config", os.path.join(work.name, "sluice.yaml"))
        port = free_port()
        base = f"http://127.0.0.1:{port}"
        began = time.monotonic()
        server = start("open-webui", os.path.join(folder, "bin/python"), os.path.join(folder, "bin/open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port),
                       ENABLE_OLLAMA_API="false", OPENAI_API_BASE_URL=router + "/v1", OPENAI_API_KEY=key["key"], DATA_DIR=os.path.join(work.name, "data"), WEBUI_SECRET_KEY="of-this-test",
                       OFFLINE_MODE="true", HF_HUB_OFFLINE="1", RAG_EMBEDDING_ENGINE="openai", ENABLE_TITLE_GENERATION="false")
        while True:
            try:
                call(base + "/health", timeout=2)
                break
            except OSError:
                if server.poll() is not None or time.monotonic() - began > 180:
                    with open(os.path.join(work.name, "open-webui.log"), encoding="utf-8") as f:
                        check("Open WebUI starts", False, f.read())
                    sys.exit("open_webui_test: failed")
                time.sleep(0.5)
        check(f"Open WebUI {VERSION} starts, in {time.monotonic() - began:.0f} s", True)
        user = json.loads(call(base + "/api/v1/auths/signup", {"name": "Test", "email": "test@example.com", "password": "of-this-test"}))
        models = json.loads(call(base + "/api/models", token=user["token"]))
        check("its list of models has the router's", [m["id"] for m in models["data"]] == ["my-model"], models)
        chat = {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        try:
            answer = json.loads(call(base + "/api/chat/completions", {**chat, "stream": False}, user["token"]))
            check("a chat is answered", answer["choices"][0]["message"]["content"], answer)
            stream = call(base + "/api/chat/completions", {**chat, "stream": True}, user["token"])
            check("a streamed chat ends with [DONE]", stream.count("data: ") > 4 and stream.rstrip().endswith("data: [DONE]"), stream)
        except urllib.error.HTTPError as e:
            check("a chat is answered", False, f"{e}: {e.read().decode(errors='replace')}")
        metrics = call(router + "/metrics", timeout=5)
        counted = sum(float(v) for v in re.findall(r'^sluice_api_key_requests_total\{[^}]*key="open-webui"[^}]*\} ([\d.e+]+)$', metrics, flags=re.M))
        check(f"the router counts them for the key open-webui: {counted:.0f}", counted >= 2, "\n".join(line for line in metrics.splitlines() if "api_key" in line))
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
        sys.exit("open_webui_test: some checks failed")
    print("open_webui_test: all checks passed")


if __name__ == "__main__":
    main()
