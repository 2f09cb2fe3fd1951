"""One prefill and one decode engine of vLLM with NixlConnector and KV events."""

import json
import re
import subprocess
import time

import http_calls
import prompts
from departures import Departures
from engines import BLOCK_SIZE, Engine, wait_ready
from processes import say
from report import short
from router import Router
from two_prefills import TwoPrefills

# Seconds for which the prefill engine keeps blocks for decode.
LEASE = 30

HITS = "vllm:prefix_cache_hits_total"


def until(condition, timeout, pause=0.25):
    """Polls until condition() is true or `timeout` seconds have passed; returns its last value."""
    end = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return value


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("P/D with NixlConnector")
        self.p = Engine(context.cache, context.run_dir, "prefill", kv_role="kv_producer")
        self.d = Engine(context.cache, context.run_dir, "decode", kv_role="kv_consumer")
        try:
            wait_ready([self.p, self.d])
            flags = ["--prefill", f"{self.p.url},id=p1", "--decode", f"{self.d.url},id=d1"]
            report.note("router: `sluice serve --prefill URL,id=p1 --decode URL,id=d1`")
            self.router = Router(context.router, context.run_dir, "router-pd", flags)
            self.router.wait_ready()
            for check in (
                self.models,
                self.same_text,
                self.other_endpoints,
                self.identity,
                self.second_turn,
                self.odd_prompts,
                self.forbidden,
                self.abort,
                self.good_run,
                self.several_prompts,
                self.two_choices,
                self.official_clients,
                self.early_abort,
                self.ending,
            ):
                with report.guarded(check.__name__.replace("_", " ")):
                    check()
            self.router.process.stop(5)
            Departures(context, self.p, self.d, self.idle, self.alone).run()
            TwoPrefills(context, self.p, self.d, self.alone).run()
        finally:
            if hasattr(self, "router"):
                self.router.process.stop(5)
            self.p.stop()
            self.d.stop()

    def alone(self, path, body):
        """Sends the request directly to the decode engine. The salt prevents a hit on the KV that
        the engine pulled for the router, so that it computes the whole prompt."""
        return http_calls.post(self.d.url, path, {**body, "cache_salt": f"alone-{time.time_ns()}"})

    def nudge(self):
        """Sends a tiny request to prefill: an idle engine does not step, so it neither reads
        notifications nor updates its gauges."""
        http_calls.post(self.p.url, "/v1/completions", {"model": "tiny", "prompt": [300], "max_tokens": 1})

    def idle(self):
        """Reports whether neither engine runs a request or has blocks in use."""
        self.nudge()
        return all(
            e.metrics().sum("vllm:num_requests_running") == 0 and e.metrics().usage_blocks() == 0
            for e in (self.p, self.d)
        )

    def settle(self):
        if not until(self.idle, LEASE + 15):
            raise RuntimeError("the engines still have blocks in use")

    def models(self):
        seen = [m["id"] for m in http_calls.get(self.router.url, "/v1/models").json()["data"]]
        self.report.equal("`/v1/models` lists the engines' model", ["tiny"], seen)

    def same_text(self):
        """Compares the texts, and checks where the KV came from."""
        asked = []
        p0, d0 = self.p.metrics(), self.d.metrics()
        for path, make in (("/v1/completions", prompts.completions), ("/v1/chat/completions", prompts.chat)):
            for streamed in (False, True):
                body = make(prompts.text())
                begun = time.monotonic()
                answer = self.router.ask(path, {**body, "stream": streamed})
                say(f"{path}{' streamed' if streamed else ''}: {answer.status} in {time.monotonic() - begun:.2f} s")
                asked.append((path, streamed, body, prompts.generated(path, answer, streamed)))
        transfers = "vllm:nixl_xfer_time_seconds_count"
        until(lambda: self.d.metrics().sum(transfers) - d0.sum(transfers) >= len(asked), 30)
        p1, d1 = self.p.metrics(), self.d.metrics()

        tokens = 0
        for path, streamed, body, seen in asked:
            alone = self.alone(path, body)
            tokens += alone.json()["usage"]["prompt_tokens"]
            expected = prompts.generated(path, alone)
            name = f"`{path}`{', streamed' if streamed else ''}: the text of the decode instance alone"
            self.report.row(name, short(expected), short(seen), seen == expected and seen)

        def rise(before, after, name, **labels):
            return int(after.sum(name, **labels) - before.sum(name, **labels))

        by_source = "vllm:prompt_tokens_by_source_total"
        row = self.report.row
        n = len(asked)
        seen = rise(d0, d1, transfers)
        row("NIXL transfers that decode finished for these requests", n, seen, seen == n)
        seen = rise(d0, d1, "vllm:nixl_bytes_transferred_sum")
        row("bytes moved to decode", "more than 0", seen, seen > 0)
        seen = rise(d0, d1, by_source, source="external_kv_transfer")
        row("prompt tokens that decode received from prefill", f"{tokens} (all)", seen, seen == tokens)
        seen = rise(d0, d1, by_source, source="local_compute")
        limit = n * (BLOCK_SIZE + 1)
        row("prompt tokens that decode computed itself", f"at most {limit} (a block each)", seen, seen <= limit)
        seen = rise(p0, p1, by_source, source="local_compute")
        row("prompt tokens that prefill computed", f"{tokens} (all)", seen, seen == tokens)

    def other_endpoints(self):
        """Checks the endpoints whose prefill leg has other field names."""
        words = prompts.text()
        d0 = self.d.metrics()
        for path, body in (
            ("/v1/responses", prompts.responses(words)),
            ("/v1/messages", prompts.chat(prompts.text())),
            ("/inference/v1/generate", prompts.generate(self.token_ids(prompts.text()))),
        ):
            seen = prompts.generated(path, self.router.ask(path, body))
            if path == "/v1/messages":
                # Anthropic's request has no salt, so the reference is the same chat in OpenAI's format.
                reference = "/v1/chat/completions"
            else:
                reference = path
            expected = prompts.generated(reference, self.alone(reference, body))
            name = f"`{path}`: the text of the decode instance alone"
            self.report.row(name, short(expected), short(seen), seen == expected and seen)
        transfers = "vllm:nixl_xfer_time_seconds_count"
        moved = until(lambda: self.d.metrics().sum(transfers) - d0.sum(transfers) >= 3, 20)
        self.report.row("NIXL transfers for these three", "3", 3 if moved else "fewer", moved)

    def token_ids(self, words):
        return http_calls.post(self.d.url, "/tokenize", {"model": "tiny", "prompt": words}).json()["tokens"]

    def identity(self):
        name = f"e2e-{time.time_ns()}"
        answer = self.router.ask("/v1/chat/completions", prompts.chat(prompts.text()), {"X-Request-Id": name})
        h = answer.headers
        equal = self.report.equal
        equal("`X-Request-Id` comes back", name, h.get("X-Request-Id"))
        equal("it is in the id of decode's answer", f"chatcmpl-{name}", answer.json().get("id"))
        for engine in (self.p, self.d):
            with open(engine.process.log, encoding="utf-8", errors="replace") as f:
                seen = f"chatcmpl-{name}" in f.read()
            equal(f"it is in the log of {engine.name}", True, seen)
        equal("`X-Sluice-Worker`", "d1", h.get("X-Sluice-Worker"))
        equal("`X-Sluice-Prefill-Worker`", "p1", h.get("X-Sluice-Prefill-Worker"))
        equal("`X-Sluice-Rank`", "0", h.get("X-Sluice-Rank"))
        cached = h.get("X-Sluice-Cached-Tokens") or ""
        self.report.row("`X-Sluice-Cached-Tokens` of a new prompt", "0", cached, cached == "0")
        status, text = self.router.explain(name)
        self.report.row(
            "`sluice explain` of this request",
            "exit 0, names p1 and d1",
            f"exit {status}, {short(text)}",
            status == 0 and "p1" in text and "d1" in text,
        )

    def second_turn(self):
        """KV events report the cached blocks of the first turn to the router."""
        body = prompts.chat(prompts.text(80))
        first = self.router.ask("/v1/chat/completions", body)
        time.sleep(2)  # for the events of the first turn
        before = [e.metrics().sum(HITS) for e in (self.p, self.d)]
        body["messages"] += [
            {"role": "assistant", "content": prompts.generated("/v1/chat/completions", first)},
            {"role": "user", "content": "and back?"},
        ]
        second = self.router.ask("/v1/chat/completions", body)
        predicted = int(second.headers.get("X-Sluice-Cached-Tokens") or 0)
        hits = [int(e.metrics().sum(HITS) - b) for e, b in zip((self.p, self.d), before, strict=True)]
        # Prefill computes the prompt. Decode also caches the answer's blocks, so it can have one more.
        self.report.row(
            "second turn of a chat: cached tokens predicted",
            f"{hits[0]} (prefill's hits; decode has {hits[1]})", predicted, predicted == hits[0] > 0,
        )  # fmt: skip
        expected = prompts.generated("/v1/chat/completions", self.alone("/v1/chat/completions", body))
        seen = prompts.generated("/v1/chat/completions", second)
        self.report.row("its text", short(expected), short(seen), seen == expected)

    def odd_prompts(self):
        """Prompts shorter than a block, of whole blocks, and long."""
        for name, ids in (
            ("1 token", [300]),
            ("5 tokens, less than a block", list(range(400, 405))),
            (f"{BLOCK_SIZE * 4} tokens, whole blocks", list(range(500, 500 + BLOCK_SIZE * 4))),
            ("3000 tokens", [300 + (i * i) % 3001 for i in range(3000)]),
        ):
            body = prompts.completions(ids)
            seen = prompts.generated("/v1/completions", self.router.ask("/v1/completions", body))
            expected = prompts.generated("/v1/completions", self.alone("/v1/completions", body))
            self.report.row(f"a prompt of {name}", short(expected), short(seen), seen == expected and seen)

    def forbidden(self):
        """Fields that a client must not set: one such request terminates this engine."""
        for field in (
            {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False}},
            {"kv_transfer_params": {"do_remote_decode": True}},
            {"disagg_prefill_resp": {}},
        ):
            body = {**prompts.completions("hello there"), **field}
            answer = self.router.ask("/v1/completions", body)
            seen = f"{answer.status} {answer.headers.get('X-Sluice-Reason')}"
            self.report.equal(f"a client sends `{json.dumps(field)}`", "400 forbidden_field", seen)
        self.report.equal("both engines are alive after that", [True, True], [self.p.alive(), self.d.alive()])

    def endless(self):
        return {**prompts.chat(prompts.text()), "max_tokens": 3500, "ignore_eos": True, "stream": True}

    def abort(self):
        self.settle()
        made = self.d.metrics().sum("vllm:generation_tokens_total")
        with http_calls.Open(self.router.url, "/v1/chat/completions", self.endless()) as stream:
            # An event is a line and an empty line.
            self.router.bodies.append(b"".join(stream.response.readline() for _ in range(10)))
        gone = time.monotonic()
        until(lambda: self.d.metrics().sum("vllm:num_requests_running") == 0, 20, 0.1)
        stopped = time.monotonic() - gone
        until(self.idle, LEASE, 0.1)
        freed = time.monotonic() - gone
        made = int(self.d.metrics().sum("vllm:generation_tokens_total") - made)
        row = self.report.row
        row("a client leaves a stream of 3500 tokens after 5: tokens generated", "fewer than 1000", made, made < 1000)
        row("decode runs no request", "within 5 s", f"{stopped:.1f} s", stopped < 5)
        limit = 10
        row("prefill's blocks are free", f"within {limit} s (lease: {LEASE} s)", f"{freed:.1f} s", freed < limit)

    def good_run(self):
        p, d = self.p.metrics(), self.d.metrics()
        for name, engine in (
            ("nixl_num_kv_expired_reqs_total", p),
            ("nixl_num_notifications_after_expiry_total", p),
            ("nixl_num_failed_transfers_total", d),
            ("nixl_num_failed_notifications_total", d),
        ):
            self.report.equal(f"so far: `{name}`", 0, int(engine.sum("vllm:" + name)))

    def two_choices(self):
        """A handle allows one read. Several choices would each read it, all but the first after
        prefill has freed the blocks."""
        late = "vllm:nixl_num_notifications_after_expiry_total"
        before = self.p.metrics().sum(late)
        # This engine refuses n=2 at temperature 0; the seed makes the answer repeatable.
        body = {**prompts.completions(prompts.text()), "n": 2, "temperature": 0.8, "seed": 5}
        seen = [c["text"] for c in self.router.ask("/v1/completions", body).json()["choices"]]
        expected = [c["text"] for c in self.alone("/v1/completions", body).json()["choices"]]
        self.report.row("n=2 with a seed: both texts", short(expected), short(seen), seen == expected)
        self.settle()
        seen = int(self.p.metrics().sum(late) - before)
        self.report.row("n=2: reads of blocks that prefill had released", 0, seen, seen == 0)

    def several_prompts(self):
        """A handle belongs to one prompt. With two prompts, decode would answer one from the KV
        of the other, and the engine would terminate if their lengths differ."""
        body = {**prompts.completions(None), "prompt": [prompts.text(30), prompts.text(90)]}
        seen = [c["text"] for c in self.router.ask("/v1/completions", body).json()["choices"]]
        expected = [c["text"] for c in self.alone("/v1/completions", body).json()["choices"]]
        self.report.row("two prompts in one request: both texts", short(expected), short(seen), seen == expected)
        self.report.equal("decode is alive after that", True, self.d.alive())

    def official_clients(self):
        if not self.context.clients:
            return
        # The tiny model has no tool parser and no embeddings.
        argv = [self.context.clients, "--skip", "tools,embeddings", self.router.url]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
        print(done.stdout, flush=True)
        seen = re.findall(r"^((?:python|npm) openai \S+)|^(\d+ passed, \d+ failed)", done.stdout, re.M)
        seen = ", ".join(a or b for a, b in seen)
        self.report.row("official clients without tools and embeddings", "0 failed, twice", seen, done.returncode == 0)

    def early_abort(self):
        """Clients that disconnect while prefill runs, between the legs, and before decode answers.
        Prefill keeps the blocks of a handle that decode never read until the lease ends."""
        self.settle()
        delays = (0.005, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15)
        for delay in delays:
            connection = http_calls.send(self.router.url, "/v1/chat/completions", self.endless())
            time.sleep(delay)
            connection.close()
        gone = time.monotonic()
        time.sleep(1)
        until(self.idle, LEASE + 30, 0.5)
        took = time.monotonic() - gone
        limit = LEASE + 5
        self.report.row(
            f"{len(delays)} clients leave 5 to 150 ms after their request: no block is in use",
            f"within {limit} s (lease {LEASE} s, and polling)", f"{took:.1f} s", took < limit,
        )  # fmt: skip
        body = prompts.completions(prompts.text())
        seen = prompts.generated("/v1/completions", self.router.ask("/v1/completions", body))
        expected = prompts.generated("/v1/completions", self.alone("/v1/completions", body))
        self.report.row("the next request", short(expected), short(seen), seen == expected)

    def ending(self):
        leaks = [b for b in self.router.bodies if b"remote_block_ids" in b or b"remote_engine_id" in b]
        n = len(self.router.bodies)
        self.report.row(f"of {n} answers and first events of streams, those that contain the handle", 0, len(leaks), not leaks)
        self.report.equal("both engines are alive at the end", [True, True], [self.p.alive(), self.d.alive()])
        status, took = self.router.stop()
        self.report.row("SIGTERM ends the idle router", "exit 0 within 2 s", f"exit {status} after {took:.1f} s",
                        status == 0 and took < 2)  # fmt: skip
