"""One aggregated engine with two data-parallel ranks behind one URL."""

import time

import http_calls
import prompts
from engines import Engine, wait_ready
from report import short
from router import Router

RANKS = 2


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("Two data-parallel ranks behind one URL (aggregated)")
        self.engine = Engine(context.cache, context.run_dir, "aggregated-dp2", ranks=RANKS)
        try:
            wait_ready([self.engine])
            report.note(f"router: `sluice serve --engine URL,id=a1,ranks={RANKS}`")
            flags = ["--engine", f"{self.engine.url},id=a1,ranks={RANKS}"]
            self.router = Router(context.router, context.run_dir, "router-dp", flags)
            self.router.wait_ready()
            for check in (self.event_sources, self.both_ranks, self.second_turns, self.a_client_cannot_choose, self.ending):
                with report.guarded(check.__name__.replace("_", " ")):
                    check()
        finally:
            if hasattr(self, "router"):
                self.router.process.stop(5)
            self.engine.stop()

    def alone(self, path, body, rank):
        salted = {**body, "cache_salt": f"alone-{time.time_ns()}"}
        return http_calls.post(self.engine.url, path, salted, {"X-data-parallel-rank": str(rank)})

    def event_sources(self):
        self.report.equal("the engine publishes KV events for ranks", ["0", "1"], sorted(self.engine.kv_event_sources()))

    def both_ranks(self):
        """Different prompts reach both ranks, each the rank that the header names."""
        done = "vllm:request_success_total"
        before = self.engine.metrics()
        counts = [0] * RANKS
        wrong = []
        for _ in range(16):
            body = prompts.completions(prompts.text())
            answer = self.router.ask("/v1/completions", body)
            rank = int(answer.headers["X-Sluice-Rank"])
            counts[rank] += 1
            seen = prompts.generated("/v1/completions", answer)
            expected = prompts.generated("/v1/completions", self.alone("/v1/completions", body, rank))
            if seen != expected:
                wrong.append((rank, short(seen), short(expected)))
        after = self.engine.metrics()
        # The engine served each request twice: alone() repeated it at the same rank.
        served = [
            int(after.sum(done, engine=str(r)) - before.sum(done, engine=str(r))) - counts[r] for r in range(RANKS)
        ]
        self.report.row("16 prompts without a common prefix reach both ranks", "each at least once", counts, min(counts) > 0)
        self.report.equal("requests by rank: the header and the engine's metric", counts, served)
        self.report.row("each text is that of the engine alone", "16 equal", f"{16 - len(wrong)} equal {wrong or ''}", not wrong)

    def second_turns(self):
        """The second turn of a chat goes to the rank that has the first."""
        path = "/v1/chat/completions"
        hits = "vllm:prefix_cache_hits_total"
        chats = []
        # New prompts are placed at random; chats are added until each rank has two.
        while len(chats) < 40 and (len(chats) < 6 or min(self.spread(chats)) < 2):
            body = prompts.chat(prompts.text(80))
            answer = self.router.ask(path, body)
            body["messages"] += [
                {"role": "assistant", "content": prompts.generated(path, answer)},
                {"role": "user", "content": "and back?"},
            ]
            chats.append((body, int(answer.headers["X-Sluice-Rank"])))
        time.sleep(2)  # for the events of the first turns
        spread = self.spread(chats)
        self.report.row(f"{len(chats)} chats begin, by rank", "each at least 2", spread, min(spread) >= 2)
        ranks, predicted, hit = [], [], []
        for body, rank in chats:
            before = self.engine.metrics()
            answer = self.router.ask(path, body)
            after = self.engine.metrics()
            ranks.append(int(answer.headers["X-Sluice-Rank"]))
            predicted.append(int(answer.headers["X-Sluice-Cached-Tokens"]))
            hit.append(int(after.sum(hits, engine=str(rank)) - before.sum(hits, engine=str(rank))))
        self.report.equal("their second turns go to the same ranks", [rank for _, rank in chats], ranks)
        self.report.row("cached tokens predicted", "above 0 each", predicted, min(predicted) > 0)
        self.report.equal("prefix-cache hits of that rank, by the engine", predicted, hit)

    @staticmethod
    def spread(chats):
        return [sum(rank == r for _, rank in chats) for r in range(RANKS)]

    def a_client_cannot_choose(self):
        body = prompts.completions(prompts.text())
        answer = self.router.ask("/v1/completions", body, {"X-data-parallel-rank": "7"})
        self.report.equal("a client's own `X-data-parallel-rank: 7` does not reach the engine", 200, answer.status)

    def ending(self):
        self.report.equal("the engine is alive at the end", True, self.engine.alive())
        status, took = self.router.stop()
        self.report.row("SIGTERM ends the idle router", "exit 0 within 2 s", f"exit {status} after {took:.1f} s",
                        status == 0 and took < 2)  # fmt: skip
