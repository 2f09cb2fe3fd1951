"""A second prefill engine joins: chats return to the engine of their first turn, and one of
the two engines is killed."""

import concurrent.futures
import time

import prompts
from engines import Engine, wait_ready
from report import short
from router import Router

CHAT = "/v1/chat/completions"
HITS = "vllm:prefix_cache_hits_total"


class TwoPrefills:
    """Checks with the prefill and decode engines of section pd and another prefill engine."""

    def __init__(self, context, prefill, decode, alone):
        self.context = context
        self.report = context.report
        self.decode = decode
        self.alone = alone
        self.prefills = {"p1": prefill}

    def run(self):
        self.report.section("Two prefill engines, one decode engine")
        self.prefills["p2"] = Engine(self.context.cache, self.context.run_dir, "prefill-2", kv_role="kv_producer")
        try:
            wait_ready([self.prefills["p2"]])
            flags = [f for name, e in self.prefills.items() for f in ("--prefill", f"{e.url},id={name}")]
            flags += ["--decode", f"{self.decode.url},id=d1"]
            self.report.note("router: `sluice serve --prefill URL,id=p1 --prefill URL,id=p2 --decode URL,id=d1`")
            self.router = Router(self.context.router, self.context.run_dir, "router-two-prefills", flags)
            try:
                self.router.wait_ready()
                for check in (self.second_turns, self.one_dies):
                    with self.report.guarded(check.__name__.replace("_", " ")):
                        check()
            finally:
                self.router.process.stop(5)
        finally:
            self.prefills["p2"].stop()

    def second_turns(self):
        # One at a time, new prompts go where they displace nothing: p2's cache is empty.
        chats = [self.begin() for _ in range(6)]
        self.report.equal("6 chats begin one at a time, by prefill engine", {"p1": 0, "p2": 6}, self.spread(chats))
        # Together, they do not wait for each other. Chats are added until each engine has two.
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            while len(chats) < 46 and min(self.spread(chats).values()) < 2:
                chats += pool.map(lambda _: self.begin(), range(4))
        spread = self.spread(chats)
        self.report.row(
            f"{len(chats)} chats, the others four at a time", "each at least 2", spread, min(spread.values()) >= 2
        )
        time.sleep(2)  # for the events of the first turns
        workers, predicted, hit, equal = [], [], [], 0
        for body, worker in chats:
            engine = self.prefills[worker]
            before = engine.metrics().sum(HITS)
            answer = self.router.ask(CHAT, body)
            workers.append(answer.headers["X-Sluice-Prefill-Worker"])
            predicted.append(int(answer.headers["X-Sluice-Cached-Tokens"]))
            hit.append(int(engine.metrics().sum(HITS) - before))
            equal += prompts.generated(CHAT, answer) == prompts.generated(CHAT, self.alone(CHAT, body))
        began = [worker for _, worker in chats]
        self.report.equal("their second turns run prefill where their first turn did", began, workers)
        self.report.row("cached tokens predicted", "above 0 each", predicted, min(predicted) > 0)
        self.report.equal("prefix-cache hits of that engine, by its metrics", predicted, hit)
        self.report.equal("second turns whose text is that of decode alone", len(chats), equal)

    def begin(self):
        """Runs a chat's first turn. Returns the body of the second turn and the prefill worker."""
        body = prompts.chat(prompts.text(80))
        answer = self.router.ask(CHAT, body)
        body["messages"] += [
            {"role": "assistant", "content": prompts.generated(CHAT, answer)},
            {"role": "user", "content": "and back?"},
        ]
        return body, answer.headers["X-Sluice-Prefill-Worker"]

    def spread(self, chats):
        return {name: sum(worker == name for _, worker in chats) for name in self.prefills}

    def one_dies(self):
        self.prefills["p2"].process.kill()
        wrong, workers = [], []
        for _ in range(6):
            body = prompts.chat(prompts.text())
            answer = self.router.ask(CHAT, body)
            workers.append(answer.headers.get("X-Sluice-Prefill-Worker"))
            seen, expected = prompts.generated(CHAT, answer), prompts.generated(CHAT, self.alone(CHAT, body))
            if seen != expected:
                wrong.append((short(seen), short(expected)))
        self.report.row(
            "p2 is killed: 6 requests right after it have the text of decode alone", "6 equal",
            f"{6 - len(wrong)} equal {wrong or ''}", not wrong,
        )  # fmt: skip
        self.report.equal("their prefill ran on", ["p1"] * 6, workers)
