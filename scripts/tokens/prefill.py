"""Measures what a vLLM prefill server's front end spends on prompts of many tokens, sent as
text and as token ids (pd.prefill_by_ids); see scripts/tokens_vllm.sh --prefill."""

import argparse
import json
import os
import shutil
import statistics
import sys
import time

here = os.path.dirname(os.path.abspath(__file__))
sys.path += [here, os.path.join(os.path.dirname(here), "e2e_vllm")]

import http_calls  # noqa: E402
from engines import MODEL, Engine, Metrics, wait_ready  # noqa: E402
from processes import say  # noqa: E402
from router import Router  # noqa: E402

PATH = "/v1/chat/completions"
MAX_LEN = 18_000
BEGIN, END = "<!-- prefill-by-ids -->", "<!-- /prefill-by-ids -->"
TICK = os.sysconf("SC_CLK_TCK")
WORDS = ["river", "table", "green", "letter", "window", "summer", "paper", "mountain", "silver", "garden", "number", "engine", "yellow", "market", "bridge", "winter"]


def make_folder(cache, folder):
    """A copy of the tiny model for long prompts."""
    os.makedirs(folder)
    for name in os.listdir(os.path.join(cache, "model")):
        if not name.startswith(".") and name != "config.json":
            os.symlink(os.path.join(cache, "model", name), os.path.join(folder, name))
    with open(os.path.join(cache, "model", "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    config["max_position_embeddings"] = MAX_LEN + 2000
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)


def front_end(engine):
    """CPU seconds of the server's own process; the engine core is a child of it."""
    with open(f"/proc/{engine.process.popen.pid}/stat", encoding="ascii") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def conversation(engine, tokens):
    """Messages of about so many tokens. Each prompt repeats them and adds a message of its own,
    so that the engine core computes little and the front end renders and tokenizes all."""
    messages = []
    k = count = 0
    while count < tokens:
        for _ in range(8):
            text = " ".join(WORDS[(k * 7 + i * (k + 3)) % len(WORDS)] + str((k * i) % 97) for i in range(60))
            messages.append({"role": "assistant" if k % 2 else "user", "content": f"{k}: {text}"})
            k += 1
        answer = http_calls.post(engine.url, "/tokenize", {"model": MODEL, "messages": messages}).json()
        count = answer["count"]
    while count > tokens:
        messages.pop()
        count = http_calls.post(engine.url, "/tokenize", {"model": MODEL, "messages": messages}).json()["count"]
    return messages, count


class Rounds:
    """CPU of the front end per request, and the time of requests, by form of the prompt."""

    def __init__(self, engine):
        self.engine = engine
        self.cpu, self.took = {}, {}

    def measure(self, form, requests, send):
        before = front_end(self.engine)
        for i in range(requests):
            begun = time.monotonic()
            send(i)
            self.took.setdefault(form, []).append(time.monotonic() - begun)
        self.cpu.setdefault(form, []).append((front_end(self.engine) - before) / requests)

    def row(self, form):
        cpu = self.cpu[form]
        return f"| {form} | {1000 * statistics.median(cpu):.1f} | {1000 * min(cpu):.1f}–{1000 * max(cpu):.1f} | {1000 * statistics.median(self.took[form]):.0f} |"


def check(answer, what):
    if answer.status != 200:
        raise RuntimeError(f"{what}: {answer.status} {answer.text()[:500]}")
    return answer.json()


def through_router(routers, p, messages, rounds, requests):
    """Alternates rounds with text and with ids. Returns the rounds, and how many answers differ."""
    serial = 0
    different = 0
    measured = Rounds(p)

    def body(n):
        last = {"role": "user", "content": f"question {n}: which of them is number {n}?"}
        return {"model": MODEL, "messages": [*messages, last], "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    def ids(router):
        m = Metrics(http_calls.get(router.url, "/metrics").text())
        return m.sum("sluice_prefill_prompts_total", form="ids")

    end = time.monotonic() + 120
    while ids(routers["ids"]) == 0:
        for form in routers:
            check(http_calls.post(routers[form].url, PATH, body(0)), form)
        if time.monotonic() > end:
            raise RuntimeError("the router sends no ids: " + http_calls.get(routers["ids"].url, "/metrics").text()[-3000:])
        time.sleep(0.5)
    for _ in range(rounds):
        texts = {}
        for form in ("text", "ids"):
            before = ids(routers["ids"])

            def send(i, form=form, texts=texts, base=serial):
                answer = check(http_calls.post(routers[form].url, PATH, body(base + i)), form)
                texts.setdefault(base + i, set()).add(answer["choices"][0]["message"]["content"])

            measured.measure(form, requests, send)
            sent = ids(routers["ids"]) - before
            if sent != (requests if form == "ids" else 0):
                raise RuntimeError(f"{sent} legs had ids in a round of {requests} as {form}")
        different += sum(len(t) > 1 for t in texts.values())
        serial += requests
    return measured, different, serial


def directly(p, messages, rounds, requests):
    """The same prompts to the prefill server alone, in the forms in which it takes ids."""
    measured = Rounds(p)
    last = {"role": "user", "content": "which of them is the first?"}
    whole = {"model": MODEL, "messages": [*messages, last], "max_tokens": 1}
    ids = http_calls.post(p.url, "/tokenize", {"model": MODEL, "messages": whole["messages"]}).json()["tokens"]
    forms = {
        "chat: text": (PATH, whole),
        "chat: ids beside the text": (PATH, {**whole, "kv_transfer_params": {"prompt_token_ids": ids}}),
        "chat: ids, the text replaced by a word": (PATH, {**whole, "messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": ids}}),
        "completions: ids": ("/v1/completions", {"model": MODEL, "prompt": ids, "max_tokens": 1}),
    }
    for path, body in forms.values():
        n = check(http_calls.post(p.url, path, body), path)["usage"]["prompt_tokens"]
        if n != len(ids):
            raise RuntimeError(f"{path}: {n} prompt tokens, want {len(ids)}")
    for _ in range(rounds):
        for form, (path, body) in forms.items():
            measured.measure(form, requests, lambda _i, path=path, body=body: check(http_calls.post(p.url, path, body), path))
    return measured


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--cache", required=True)
    a.add_argument("--run-dir", required=True)
    a.add_argument("--router", required=True)
    a.add_argument("--requests", type=int, default=20, help="of a round")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--tokens", type=int, default=16_000)
    a.add_argument("--report", help="the document that gets the figures")
    args = a.parse_args()

    folder = os.path.join(args.run_dir, "model")
    make_folder(args.cache, folder)
    engine_cache = os.path.join(args.run_dir, "cache")
    os.makedirs(engine_cache)
    os.symlink(os.path.join(args.cache, "venv"), os.path.join(engine_cache, "venv"))
    os.symlink(folder, os.path.join(engine_cache, "model"))
    more = ("--max-model-len", str(MAX_LEN), "--num-gpu-blocks-override", "1600")
    p = Engine(engine_cache, args.run_dir, "prefill", kv_role="kv_producer", more=more)
    d = Engine(engine_cache, args.run_dir, "decode", kv_role="kv_consumer", more=more)
    routers = {}
    try:
        wait_ready([p, d])
        for form, mode in (("text", "off"), ("ids", "verified")):
            config = os.path.join(args.run_dir, form + ".yaml")
            with open(config, "w", encoding="utf-8") as f:
                f.write(f"models:\n  {MODEL}:\n    tokenizer: {folder}\ntokens:\n  verify_ratio: 0.0001\n  timeout: 10s\npd:\n  prefill_by_ids: {mode}\n")
            routers[form] = Router(args.router, args.run_dir, "router-" + form, ["--config", config, "--prefill", p.url, "--decode", d.url])
            routers[form].wait_ready()
        messages, count = conversation(p, args.tokens)
        say(f"prompts of {count} tokens and a question, {len(messages)} messages, {len(json.dumps(messages))} bytes")
        begun, before = time.monotonic(), front_end(p)
        time.sleep(10)
        idle = (front_end(p) - before) / (time.monotonic() - begun)
        measured, different, total = through_router(routers, p, messages, args.rounds, args.requests)
        direct = directly(p, messages, args.rounds, args.requests)
    finally:
        for part in (*routers.values(), p, d):
            part.stop()
        shutil.rmtree(engine_cache, ignore_errors=True)
    text = table(measured, direct, args, count, idle, different, total)
    print("\n" + text)
    if args.report:
        write(args.report, text)
    return 1 if different else 0


def table(measured, direct, args, count, idle, different, total):
    head = "| prompt | CPU, ms | range | request, ms |\n| --- | --- | --- | --- |\n"
    through = head + "\n".join(measured.row(form) for form in ("text", "ids"))
    alone = head + "\n".join(direct.row(form) for form in direct.cpu)
    return f"""CPU of the prefill server's front end for a request of {count} tokens: median and range of {args.rounds} rounds of {args.requests} requests, the forms in alternation; the median time of a request.
The figures contain what the front end uses without requests, {1000 * idle:.0f} ms a second; the load average was {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores.

Through the router, prefill and decode, `pd.prefill_by_ids` off (text) and `verified` (ids); {total - different} of {total} prompts have the same answer in both forms:

{through}

To the prefill server alone, one token:

{alone}"""


def write(path, text):
    """Replaces what is between the marks in a document."""
    with open(path, encoding="utf-8") as f:
        page = f.read()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no {BEGIN} … {END}")
    with open(path, "w", encoding="utf-8") as f:
        f.write(f"{before}{BEGIN}\n{text}\n{END}{after}")


sys.exit(main())
