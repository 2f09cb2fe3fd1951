"""Compares native token ids with those of a real vLLM server, for random requests over
all APIs; see scripts/tokens_vllm.sh."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import time

here = os.path.dirname(os.path.abspath(__file__))
sys.path += [here, os.path.join(os.path.dirname(here), "e2e_vllm")]

import http_calls  # noqa: E402
from bodies import APIS, Generator  # noqa: E402
from engines import MODEL, Engine, Metrics, wait_ready  # noqa: E402
from processes import say  # noqa: E402
from router import Router  # noqa: E402

TOKENIZE = '"POST /tokenize '  # in the engine's log
BEGIN = "<|endoftext|>"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def make_folder(cache, folder, template=None):
    """A copy of the tiny model with a token that is added before every text, unless the request or its API says
    otherwise, and with another template, if one is given."""
    os.makedirs(folder)
    for name in os.listdir(os.path.join(cache, "model")):
        if not name.startswith("."):
            os.symlink(os.path.join(cache, "model", name), os.path.join(folder, name))
    if template:
        os.remove(os.path.join(folder, "chat_template.jinja"))
        shutil.copy(template, os.path.join(folder, "chat_template.jinja"))
    path = os.path.join(folder, "tokenizer.json")
    with open(path, encoding="utf-8") as f:
        tokenizer = json.load(f)
    os.remove(path)
    begin = next(t for t in tokenizer["added_tokens"] if t["content"] == BEGIN)
    text, special = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": [special, text], "pair": [special, text, {"Sequence": {"id": "B", "type_id": 0}}],
                                   "special_tokens": {BEGIN: {"id": BEGIN, "ids": [begin["id"]], "tokens": [BEGIN]}}}
    with open(path, "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)


def body_of(generator, api):
    """A request that the server answers with one token."""
    body = getattr(generator, api)()
    body["model"] = MODEL
    body["max_output_tokens" if api == "responses" else "max_tokens"] = 1
    if body.get("tool_choice") in ("required", {"type": "any"}):
        del body["tool_choice"]
    if api == "messages":
        if body.get("thinking", {}).get("type") == "enabled":
            del body["thinking"]  # it needs thousands of output tokens
    return body


def wait_loaded(router):
    """Until the router has loaded the tokenizer, the engine tokenizes the prompts."""
    end = time.monotonic() + 120
    while not Metrics(http_calls.get(router.url, "/metrics").text()).sum("sluice_tokenizer_native_models", state="used"):
        if time.monotonic() > end:
            raise RuntimeError("the router has not loaded the tokenizer within two minutes")
        time.sleep(0.1)


class Counters:
    def __init__(self, router):
        self.router = router

    def read(self):
        m = Metrics(http_calls.get(self.router.url, "/metrics").text())
        names = {"checks": "checks", "failed": "checks_failed", "mismatches": "mismatches", "counts": "count_differences", "unmodelled": "native_unmodelled", "errors": "native_failed"}
        all_ = {k: int(m.sum(f"sluice_tokenizer_{v}_total")) for k, v in names.items()}
        for source in ("native", "engine", "text", "cache", "request", "none"):
            all_[source] = int(m.sum("sluice_prompts_total", source=source))
        cached = {"compared": "compared_prompt", "predicted": "compared_predicted", "reported": "reported", "difference": "prediction_error"}
        for k, v in cached.items():
            all_[k] = int(m.sum(f"sluice_cache_{v}_tokens_total"))
        return all_

    def await_check(self, before):
        """Reads the counters once the prompt after before, if its ids are native, has been compared."""
        after = self.read()
        end = time.monotonic() + 60
        while after["native"] > before["native"] and after["checks"] + after["failed"] == before["checks"] + before["failed"]:
            if time.monotonic() > end:
                raise RuntimeError("a comparison did not end within a minute")
            time.sleep(0.01)
            after = self.read()
        return after


# Where a prompt's ids come from, in the order in which a request's own source is recognised.
SOURCES = ("native", "engine", "cache", "text", "request", "none")


class CachedTokens:
    """Cached tokens as the router predicted and the engine reported them, by API and source of the ids."""

    def __init__(self, file):
        self.file = file
        self.sums = {}
        self.requests = self.equal = 0

    def add(self, number, api, answer, before, after):
        grown = {k: after[k] - before[k] for k in after}
        source = next((s for s in SOURCES if grown[s]), "none")
        row = [grown[k] for k in ("compared", "predicted", "reported", "difference")]
        self.sums[api, source] = [a + b for a, b in zip(self.sums.get((api, source), [0, 0, 0, 0]), row)]
        if grown["compared"]:
            self.requests += 1
            self.equal += not grown["difference"]
        if grown["difference"]:
            request = {"number": number, "api": api, "source": source, "prompt": row[0], "predicted": row[1], "reported": row[2], "id": answer.headers.get("X-Request-Id")}
            self.file.write(json.dumps(request) + "\n")

    def table(self):
        rows = ["| API | ids | prompt tokens | predicted cached | reported cached | sum of differences |", "| --- | --- | --- | --- | --- | --- |"]
        rows += [f"| {api} | {source} | " + " | ".join(map(str, row)) + " |" for (api, source), row in sorted(self.sums.items())]
        return "\n".join(rows)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cache", required=True)
    p.add_argument("--run-dir", required=True)
    p.add_argument("--router", required=True)
    p.add_argument("--requests", type=int, default=1000)
    args = p.parse_args()

    folder, own = os.path.join(args.run_dir, "model"), os.path.join(args.run_dir, "model-of-another-template")
    make_folder(args.cache, folder, os.path.join(here, "chat_template.jinja"))  # prints all that the router converts
    make_folder(args.cache, own)
    more = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details", "--tokenizer", folder)
    template = ("--chat-template", os.path.join(folder, "chat_template.jinja"), "--enable-tokenizer-info-endpoint")
    engine = Engine(args.cache, args.run_dir, "engine", more=more + template)
    try:
        wait_ready([engine])
        with started(args, "router", folder, engine) as router, open(os.path.join(args.run_dir, "differences.jsonl"), "w", encoding="utf-8") as f:
            status = run(engine, router, args.requests, CachedTokens(f))
        with started(args, "router-of-another-template", own, engine) as router:
            return reported_template(engine, router) or status
    finally:
        engine.stop()


@contextlib.contextmanager
def started(args, name, folder, engine):
    """A router with the tokenizer of a folder, which it has loaded."""
    config = os.path.join(args.run_dir, name + ".yaml")
    with open(config, "w", encoding="utf-8") as f:
        f.write(f"models:\n  {MODEL}:\n    tokenizer: {folder}\ntokens:\n  verify_ratio: 1\n  timeout: 10s\n")
    router = Router(args.router, args.run_dir, name, ["--config", config, "--engine", engine.url])
    try:
        router.wait_ready()
        wait_loaded(router)
        yield router
    finally:
        router.stop()


def until(condition, seconds=10):
    """Waits until condition() is true, and returns false if it is not after that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def log_of(part):
    with open(part.process.log, encoding="utf-8", errors="replace") as f:
        return f.read()


def reported_template(engine, router):
    """The folder's template is not the engine's: the router must render with the one that the engine reports.

    Returns 1 if it does not."""
    end = time.monotonic() + 30
    while "chats are rendered with the template of the engines" not in log_of(router) and time.monotonic() < end:
        time.sleep(0.1)
    counters, generator, earlier = Counters(router), Generator(11), log_of(engine).count(TOKENIZE)
    compared = {api: 0 for api in PATHS}
    before = counters.read()
    for i in range(20):
        api = APIS[i % len(APIS)]
        http_calls.post(router.url, PATHS[api], body_of(generator, api))
        after = counters.await_check(before)
        compared[api] += after["checks"] - before["checks"]
        before = after
    tokenize_calls, ready = log_of(engine).count(TOKENIZE) - earlier, http_calls.get(router.url, "/readyz")
    print(f"\nTemplate reported by the engine: ids compared {compared}, {before['mismatches']} differ; prompts of other sources: engine {before['engine']}, cache {before['cache']}; {tokenize_calls} calls of /tokenize; /readyz {ready.status} {ready.text().strip()}")
    faults = before["mismatches"] or before["engine"] or tokenize_calls or ready.status != 200 or "degraded" in ready.text()
    if faults or not all(compared.values()):
        say("the template that the engine reports was not used for every prompt")
        return 1
    return 0


def run(engine, router, requests, cached):
    counters = Counters(router)
    generator = Generator(7)
    statuses = {}
    compared, counts = {api: 0 for api in PATHS}, {api: 0 for api in PATHS}
    begun = time.monotonic()
    before = counters.read()
    for i in range(requests):
        api = APIS[i % len(APIS)]
        answer = http_calls.post(router.url, PATHS[api], body_of(generator, api))
        statuses[api, answer.status] = statuses.get((api, answer.status), 0) + 1
        after = counters.await_check(before)
        compared[api] += after["checks"] - before["checks"]
        counts[api] += after["counts"] - before["counts"]
        cached.add(i, api, answer, before, after)
        if after["mismatches"] > before["mismatches"]:
            say(f"request {i}: the ids differ: {http_calls.get(router.url, '/readyz').text()}")
            break
        before = after
        if (i + 1) % 100 == 0:
            say(f"{i + 1} requests in {time.monotonic() - begun:.0f} s: {after}")
    tokenize_calls = log_of(engine).count(TOKENIZE)
    control = json.loads(http_calls.post(engine.url, "/tokenize", {"model": MODEL, "prompt": "counted", "return_token_strs": True}).text())
    seen = until(lambda: log_of(engine).count(TOKENIZE) == tokenize_calls + 1)
    last = counters.read()
    print("\n| API | answered 200 | other answers | ids compared |\n| --- | --- | --- | --- |")
    for api in PATHS:
        other = sum(n for (a, s), n in statuses.items() if a == api and s != 200)
        print(f"| {api} | {statuses.get((api, 200), 0)} | {other} | {compared[api]} |")
    print(f"\n{last['mismatches']} of {last['checks']} compared prompts differ; {last['failed']} comparisons had no answer; the counts that the engine reported do not fit the ids of {last['counts']} prompts ({counts}); {tokenize_calls} calls of /tokenize.")
    print(f"Prompts by source: native {last['native']}, engine {last['engine']}, cache {last['cache']}, text {last['text']}, request {last['request']}, none {last['none']}; not modelled {last['unmodelled']}, failed {last['errors']}.")
    print(f"Cached tokens: predicted {last['predicted']}, reported {last['reported']}, sum of the differences {last['difference']}; equal for {cached.equal} of {cached.requests} requests.\n\n{cached.table()}")
    faults = []
    least = max(1, requests // 20)  # a fifth of an API's share
    if last["mismatches"] or min(compared.values()) < least:
        faults.append(f"ids differ, or of an API fewer than {least} prompts were compared")
    if control["token_strs"][0] != BEGIN:
        faults.append(f"the engine does not add {BEGIN} before texts: {control}")
    if not seen:
        faults.append("a call of /tokenize is not in the engine's log, so none could have been counted")
    if tokenize_calls:
        faults.append("the engine was asked for ids")
    if last["counts"]:
        faults.append("the engine reported counts that do not fit equal ids")
    if last["difference"] > 0.01 * max(last["predicted"], last["reported"]):
        faults.append("the cached tokens differ by more than 1 %")
    if faults:
        say("; ".join(faults))
    return 1 if faults else 0


sys.exit(main())
