"""The engine API: vLLM's tokenizer and chat template in front of the router, a P/D pair behind it."""

import asyncio
import json
import os
import subprocess
import sys
import time

import http_calls
import prompts
from engines import ENVIRONMENT, MODEL, Engine, wait_ready
from processes import Process, say
from report import short
from router import Router
from section_pd import until

PYTHON = os.path.join(os.path.dirname(__file__), "..", "..", "router", "engineapi", "python")
EXAMPLE = os.path.join(PYTHON, "examples", "vllm_preprocessor.py")
sys.path.insert(0, os.path.join(PYTHON, "src"))

from sluice_engineapi import Context, Killed, Request, EngineClient  # noqa: E402

# Seconds for the example, which imports vLLM: 20 s of CPU time, and minutes on a busy machine.
IMPORTS = 900
LONG = 3000  # tokens of an answer that does not end during a check
SOON = 20  # seconds within which blocks must be free; the lease is 30


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("Engine API: vLLM's tokenizer in front, P/D with NixlConnector behind")
        self.p = Engine(context.cache, context.run_dir, "engineapi-prefill", kv_role="kv_producer")
        self.d = Engine(context.cache, context.run_dir, "engineapi-decode", kv_role="kv_consumer")
        try:
            wait_ready([self.p, self.d])
            path = os.path.join(context.run_dir, "engine.sock")
            self.address = f"unix://{path}"
            flags = ["--prefill", f"{self.p.url},id=p1", "--decode", f"{self.d.url},id=d1"]
            flags += ["--set", f"engine_api.unix_socket={path}", "--set", "engine_api.http=true"]
            report.note("router: `sluice serve --prefill URL,id=p1 --decode URL,id=d1 --set engine_api.unix_socket=PATH --set engine_api.http=true`")
            report.note("preprocessor: `router/engineapi/python/examples/vllm_preprocessor.py --json unix://PATH MODEL FOLDER MESSAGE…`")
            self.router = Router(context.router, context.run_dir, "router-engineapi", flags)
            self.router.wait_ready()
            for check in (self.example, self.over_http, self.log_probabilities, self.ends, self.caller_killed, self.ending):
                with report.guarded(check.__name__.replace("_", " ")):
                    check()
        finally:
            if hasattr(self, "router"):
                self.router.process.stop(5)
            self.p.stop()
            self.d.stop()

    def alone(self, message, max_tokens):
        """Sends a chat directly to the decode engine. The salt prevents a hit on the KV that the
        engine pulled for the router, so that it computes the whole prompt."""
        return http_calls.post(self.d.url, "/v1/chat/completions", {
            "model": MODEL, "messages": [{"role": "user", "content": message}], "max_tokens": max_tokens, "temperature": 0,
            "return_token_ids": True, "cache_salt": f"alone-{time.time_ns()}",
        }).json()  # fmt: skip

    def example(self):
        """The preprocessor receives the same tokens as from the engine directly."""
        messages = [prompts.text(words) for words in (5, 60, 200)]
        transfers = "vllm:nixl_xfer_time_seconds_count"
        p0, d0 = self.p.metrics(), self.d.metrics()
        begun = time.monotonic()
        argv = [sys.executable, EXAMPLE, "--json", "--max-tokens", str(prompts.MAX_TOKENS), self.address, MODEL]
        argv += [os.path.join(self.context.cache, "model"), *messages]
        env = {**ENVIRONMENT, "PYTHONPATH": os.path.join(PYTHON, "src")}
        run = Process(self.context.run_dir, "preprocessor", argv, env, stdout=subprocess.PIPE)
        out, _ = run.popen.communicate(timeout=IMPORTS)
        say(f"the preprocessor exited with {run.popen.returncode} after {time.monotonic() - begun:.0f} s")
        if run.popen.returncode != 0:
            raise RuntimeError(f"the preprocessor failed:\n{run.log_tail()}")
        conversations = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
        self.report.equal("conversations of the preprocessor, concurrent on one connection", len(messages), len(conversations))
        until(lambda: self.d.metrics().sum(transfers) - d0.sum(transfers) >= len(conversations), 30)
        p1, d1 = self.p.metrics(), self.d.metrics()
        for seen in conversations:
            alone = self.alone(seen["message"], prompts.MAX_TOKENS)
            choice, ids = alone["choices"][0], seen["prompt_token_ids"]
            n = len(ids)
            self.report.row(f"a prompt of {n} tokens: vLLM's tokenizer and template give the engine's own ids", short(alone["prompt_token_ids"]),
                            short(ids), ids == alone["prompt_token_ids"])  # fmt: skip
            self.report.row("its answer's tokens: those of the decode instance alone", short(choice["token_ids"]), short(seen["token_ids"]),
                            seen["token_ids"] and seen["token_ids"] == choice["token_ids"])  # fmt: skip
            self.report.row("and its text", short(choice["message"]["content"]), short(seen["text"]), seen["text"] == choice["message"]["content"])
            reported = dict(c.split(": ", 1) for c in seen["comments"])
            self.report.equal("its decision names both workers", ("p1", "d1"), (reported.get("prefill_worker_id"), reported.get("worker_id")))
        self.report.equal("NIXL transfers that decode finished for these", len(messages), int(d1.sum(transfers) - d0.sum(transfers)))
        prompt_tokens = sum(len(t["prompt_token_ids"]) for t in conversations)
        self.report.equal("prompt tokens that prefill computed", prompt_tokens, int(p1.source("local_compute") - p0.source("local_compute")))

    def over_http(self):
        """The HTTP endpoint returns the same tokens."""
        message = prompts.text()
        alone = self.alone(message, prompts.MAX_TOKENS)
        body = {
            "model": MODEL, "token_ids": alone["prompt_token_ids"], "stop_conditions": {"max_tokens": prompts.MAX_TOKENS},
            "sampling_options": {"temperature": 0}, "eos_token_ids": [2],
        }  # fmt: skip
        answer = self.router.ask("/v1/engine/generate", body)
        events = answer.events()
        items = [json.loads(e)["data"] for e in events[:-1]]
        ids = [i for item in items for i in item["token_ids"]]
        expected = alone["choices"][0]["token_ids"]
        self.report.row("`POST /v1/engine/generate`: the tokens of the decode instance alone", short(expected), short(ids), ids == expected)
        usage = items[-1].get("completion_usage", {})
        self.report.equal("its usage", (len(alone["prompt_token_ids"]), len(expected)), (usage.get("prompt_tokens"), usage.get("completion_tokens")))

    def log_probabilities(self):
        """The log-probabilities are the engine's, and at temperature 0 each token is the likeliest one."""
        ids = list(self.request().token_ids)
        alone = http_calls.post(self.d.url, "/v1/completions", {
            "model": MODEL, "prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 2, "cache_salt": f"alone-{time.time_ns()}",
        }).json()["choices"][0]["logprobs"]["token_logprobs"]  # fmt: skip
        answer = self.router.ask("/v1/engine/generate", {
            "model": MODEL, "token_ids": ids, "stop_conditions": {"max_tokens": 8}, "sampling_options": {"temperature": 0}, "output_options": {"logprobs": 2},
        })  # fmt: skip
        items = [json.loads(e)["data"] for e in answer.events()[:-1]]
        seen = [p for i in items for p in i.get("log_probs") or []]
        tokens, likeliest = ([t for i in items for t in i["token_ids"]], [t[0]["token_id"] for i in items for t in i.get("top_logprobs") or []])
        self.report.row("log-probabilities of 8 tokens: those of the decode instance alone", short([round(p, 3) for p in alone]), short([round(p, 3) for p in seen]),
                        len(seen) == len(alone) == 8 and all(abs(a - b) < 1e-2 for a, b in zip(seen, alone, strict=True)))  # fmt: skip
        self.report.row("the likeliest of each two: the generated token", short(tokens), short(likeliest), len(tokens) == 8 and likeliest == tokens)

    def request(self):
        """Returns a request for a long answer to a prompt that shares no prefix with another."""
        n = time.time_ns() % 3000
        return Request(
            token_ids=[100 + (n + i * 7) % 3500 for i in range(300)], model=MODEL,
            stop_conditions={"max_tokens": LONG, "ignore_eos": True}, sampling_options={"temperature": 0},
        )  # fmt: skip

    def ends(self):
        """stop and kill while decode runs."""

        async def begin(engine, context, end):
            """Reads an answer and calls end after the fifth token. Returns the number of tokens, the
            last item and the seconds between the call and the end of the answer."""
            tokens, last, behind = 0, None, None
            async for item in engine.generate(self.request(), context):
                if item.is_error():
                    raise RuntimeError(item.error().message)
                last = item.data()
                tokens += len(last.token_ids)
                if behind is None and tokens >= 5:
                    behind = time.monotonic()
                    end()
            return tokens, last, time.monotonic() - behind

        async def both():
            async with EngineClient(self.address) as engine:
                context = Context()
                tokens, last, took = await begin(engine, context, context.stop)
                self.report.row("stop: the last item", f"cancelled, usage of the tokens received, fewer than {LONG} tokens",
                                f"{last.finish_reason}, {last.completion_usage.completion_tokens} of {tokens} tokens, after {took:.2f} s",
                                last.finish_reason == "cancelled" and last.completion_usage.completion_tokens == tokens < LONG)  # fmt: skip
                await asyncio.to_thread(self.freed, "stop")
                context = Context()
                try:
                    await begin(engine, context, context.kill)
                    seen = "a normal end"
                except Killed as why:
                    seen = type(why).__name__
                self.report.equal("kill: the reader receives", "Killed", seen)
                await asyncio.to_thread(self.freed, "kill")

        asyncio.run(both())

    def caller_killed(self):
        """The process of a caller is killed."""
        script = (
            "import asyncio, json, sys\n"
            "from sluice_engineapi import Request, EngineClient\n"
            "async def main():\n"
            "    async for item in EngineClient(sys.argv[1]).generate(Request(**json.loads(sys.argv[2]))):\n"
            "        print(item.data().token_ids, flush=True)\n"
            "asyncio.run(main())\n"
        )
        r = self.request()
        fields = {"token_ids": list(r.token_ids), "model": r.model, "stop_conditions": r.stop_conditions, "sampling_options": r.sampling_options}
        env = {"PYTHONPATH": os.path.join(PYTHON, "src")}
        caller = Process(self.context.run_dir, "caller", [sys.executable, "-c", script, self.address, json.dumps(fields)], env, stdout=subprocess.PIPE)
        for _ in range(3):
            caller.popen.stdout.readline()
        caller.kill()
        self.freed("a caller that was killed")

    def freed(self, what):
        """Adds a row: within SOON neither engine runs a request or has blocks in use."""

        def idle():
            # An idle engine neither reads notifications nor updates its gauges; a tiny request makes it step.
            http_calls.post(self.p.url, "/v1/completions", {"model": MODEL, "prompt": [300], "max_tokens": 1})
            pages = [e.metrics() for e in (self.p, self.d)]
            return all(m.sum("vllm:num_requests_running") == 0 and m.usage_blocks() == 0 for m in pages)

        begun = time.monotonic()
        freed = until(idle, 60)
        took = time.monotonic() - begun
        self.report.row(f"{what}: both engines run no request and have no block in use", f"within {SOON} s (lease: 30 s)", f"{took:.1f} s", freed and took < SOON)

    def ending(self):
        expired = self.p.metrics().sum("vllm:nixl_num_kv_expired_reqs_total")
        self.report.equal("leases that expired", 0, int(expired))
        self.report.equal("both engines are alive at the end", [True, True], [e.alive() for e in (self.p, self.d)])
