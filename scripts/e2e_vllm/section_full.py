"""Two engines with the same model, the KV cache of one of which is full: new prompts go to the other."""

import time

import http_calls
import prompts
from engines import BLOCK_SIZE, BLOCKS, Engine, wait_ready
from router import Router

WORDS = 180  # about 600 tokens
FILL, REQUESTS, FIRST = 30, 70, 12


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("New prompts while the cache of one of two engines is full")
        engines = [Engine(context.cache, context.run_dir, name) for name in ("full", "empty")]
        router = None
        try:
            wait_ready(engines)
            flags = ["--engine", f"{engines[0].url},id=full", "--engine", f"{engines[1].url},id=empty"]
            report.note("router: `sluice serve --engine URL,id=full --engine URL,id=empty`")
            router = Router(context.router, context.run_dir, "router-full", flags)
            router.wait_ready()
            with report.guarded("new prompts are placed by the space in the caches"):
                self.place(router, engines)
        finally:
            if router:
                router.process.stop(5)
            for engine in engines:
                engine.stop()

    def body(self):
        return {**prompts.completions(prompts.text(WORDS)), "max_tokens": 2}

    def place(self, router, engines):
        full, empty = engines
        tokens = 0
        for _ in range(FILL):
            answer = http_calls.post(full.url, "/v1/completions", self.body())
            tokens += answer.json()["usage"]["prompt_tokens"]
        capacity = (BLOCKS - 1) * BLOCK_SIZE
        self.report.row("prompt tokens that the full engine has computed", f"more than {capacity}, all that its KV holds", tokens, tokens > capacity)
        time.sleep(3)  # for the events, and a report of its load
        workers, failed = [], 0
        for _ in range(REQUESTS):
            answer = router.ask("/v1/completions", self.body())
            failed += answer.status != 200
            workers.append(answer.headers.get("X-Sluice-Worker"))
        self.report.equal("requests that failed", 0, failed)
        first = workers[:FIRST].count("empty")
        self.report.row(f"of the first {FIRST} new prompts, those on the engine with space", f"{FIRST - 1} or more", first, first >= FIRST - 1)
        there = workers.count("full")
        self.report.row(
            f"of {REQUESTS} new prompts, more than both hold, those on the engine that was full first",
            f"{REQUESTS // 7} to {REQUESTS * 6 // 10}", there, REQUESTS // 7 <= there <= REQUESTS * 6 // 10,
        )  # fmt: skip
        self.report.equal("both engines are alive at the end", [True, True], [full.alive(), empty.alive()])
