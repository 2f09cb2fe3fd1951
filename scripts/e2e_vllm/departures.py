"""Clients that leave in each phase of a hand-over, and a decode that comes after the
lease of its blocks: what stays with the prefill engine, by its own count."""

import random
import statistics
import threading
import time

import http_calls
import prompts
from engines import Metrics, wait_ready
from gate import Gate
from report import short
from router import Router

CHAT = "/v1/chat/completions"
LEASE = 30  # seconds that this engine keeps blocks for decode
SOON = 20  # seconds in which blocks must be free: a first hand-over takes some, on a busy machine
ANY_TIME = 24  # clients that leave around one moment
LATE = 300  # clients that leave at any moment from just before prefill's answer on
TOGETHER = 4  # of them at a time
CONNECT = 32  # seconds that the router tries to connect, for lease_runs_out


class Departures:
    """Checks over the prefill and decode engines of section pd; idle and alone are
    that section's."""

    def __init__(self, context, prefill, decode, idle, alone):
        self.context = context
        self.report = context.report
        self.p = prefill
        self.d = decode
        self.idle = idle
        self.alone = alone

    def run(self):
        self.report.section("Clients leave phase by phase, and a lease runs out")
        wait_ready([self.p, self.d])
        self.gate = Gate(self.d.url)
        try:
            self.phases()
            with self.report.guarded("late departures"):
                self.late()
            self.lease()
        finally:
            self.gate.close()

    def phases(self):
        self.report.note("router: `sluice serve --prefill URL,id=p1 --decode GATE,id=d1`; the gate is a TCP relay before decode")
        flags = ["--prefill", f"{self.p.url},id=p1", "--decode", f"{self.gate.url},id=d1"]
        # A decode that is not streamed is left to itself for a while; here it is to be cut.
        self.start("router-departures", flags, {"SLUICE_PD_ABANDONED_DECODE_TIMEOUT": "1s"})
        try:
            for check in (self.gone_in_prefill, self.gone_between, self.gone_at_the_head, self.gone_near_the_head, self.gone_in_decode, self.gone_unstreamed, self.gone_any_time):
                with self.report.guarded(check.__name__.replace("_", " ")):
                    self.settle()
                    expired = self.count("nixl_num_kv_expired_reqs_total")
                    check()
                    seen = self.count("nixl_num_kv_expired_reqs_total") - expired
                    self.report.equal("… leases that ran out on prefill, by its own count", 0, seen)
        finally:
            self.router.process.stop(5)

    def start(self, name, flags, more=None):
        # A gate that holds bytes holds probes too.
        patient = {"SLUICE_HEALTH_INTERVAL": "10m", "SLUICE_HEALTH_TIMEOUT": "1m", "SLUICE_HEALTH_UNHEALTHY_THRESHOLD": "1000"}
        self.router = Router(self.context.router, self.context.run_dir, name, flags, {**patient, **(more or {})})
        self.router.wait_ready()

    def count(self, name):
        return int(self.p.metrics().sum("vllm:" + name))

    def ours(self, name, **labels):
        """A counter of the router's."""
        return int(Metrics(http_calls.get(self.router.url, "/metrics").text()).sum(name, **labels))

    def settle(self):
        if self.until(self.idle, LEASE + 15) is None:
            raise RuntimeError("the engines still hold blocks")

    def until(self, condition, patience, pause=0.1):
        """Seconds until condition() holds; None when it never does."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > patience:
                return None
            time.sleep(pause)
        return time.monotonic() - begun

    def freed(self, what, held=None, limit=SOON):
        """Says how long after this moment no block is held by either engine; held is what
        prefill had before, None where that may be none."""
        took = self.until(self.idle, LEASE + 15)
        seen = "never" if took is None else f"{took:.1f} s"
        ok = took is not None and took < limit
        if held is None:
            self.report.row(f"{what}: when no block was held", f"within {limit} s (lease {LEASE} s)", seen, ok)
            return
        ok = ok and held > 0
        self.report.row(
            f"{what}: blocks held by prefill before, and when all were free",
            f"more than 0, within {limit} s (lease {LEASE} s)", f"{held}, {seen}", ok,
        )  # fmt: skip

    def long(self, **more):
        """A prompt that fills most of the context, so that prefill takes a while."""
        return {**prompts.chat(prompts.text(1100)), **more}

    def leave(self, connections):
        for connection in connections:
            connection.close()

    def gone_in_prefill(self):
        """Several long prompts at once: the last is not even begun when all leave."""
        n = 4
        before = self.ours("sluice_legs_total", leg="prefill", outcome="client_gone")
        left = [http_calls.send(self.router.url, CHAT, self.long(stream=bool(i % 2))) for i in range(n)]
        running = self.until(lambda: self.p.metrics().sum("vllm:num_requests_running") > 0, 5, 0.02)
        held = self.p.metrics().usage_blocks()
        self.leave(left)
        self.freed(f"{n} clients leave while prefill runs", held)
        gone = self.ours("sluice_legs_total", leg="prefill", outcome="client_gone") - before
        seen = f"{gone}{'' if running is not None else ', none was seen running'}"
        self.report.row("… prefill legs cut for it, by the router's count", "at least 1", seen, gone >= 1)

    def held_at_decode(self, body):
        """Sends a request whose prefill has answered and whose decode waits in the gate."""
        self.gate.hold()
        left = http_calls.send(self.router.url, CHAT, body)
        if self.until(self.handed_over, 30, 0.02) is None:
            raise RuntimeError("decode was not sent")
        return left, self.p.metrics().usage_blocks()

    def handed_over(self):
        """Prefill has answered and holds its blocks, and something waits in the gate:
        that alone may be a probe."""
        prefill = self.p.metrics()
        return self.gate.kept > 0 and prefill.usage_blocks() > 0 and not prefill.sum("vllm:num_requests_running")

    def gone_between(self):
        """Decode has been sent and is not known to its engine yet: it must not be
        cut before, or nobody would tell prefill."""
        left, held = self.held_at_decode(prompts.chat(prompts.text()) | {"stream": True})
        left.close()
        time.sleep(1)
        self.gate.release()
        self.freed("a client leaves before decode's engine has its request", held)

    def gone_at_the_head(self):
        """Behind the head of decode's stream, which this engine sends before its core has
        the request."""
        n, chance = 24, random.Random(24)
        for _ in range(n):
            with http_calls.Open(self.router.url, CHAT, self.streamed()):
                time.sleep(chance.random() * 0.004)
        self.freed(f"{n} clients leave a stream when they have its head")

    def gone_near_the_head(self):
        """When the head should come, and so before it and behind it."""
        n, chance = 24, random.Random(25)
        begun = time.monotonic()
        with http_calls.Open(self.router.url, CHAT, self.streamed()):
            took = time.monotonic() - begun
        for _ in range(n):
            left = http_calls.send(self.router.url, CHAT, self.streamed())
            time.sleep(took * (0.7 + 0.5 * chance.random()))
            left.close()
        self.freed(f"{n} clients leave about when a stream's head comes")

    @staticmethod
    def streamed():
        return {**prompts.chat(prompts.text()), "max_tokens": 500, "ignore_eos": True, "stream": True}

    def gone_in_decode(self):
        body = {**prompts.chat(prompts.text()), "max_tokens": 3500, "ignore_eos": True, "stream": True}
        made = self.d.metrics().sum("vllm:generation_tokens_total")
        self.gate.hold()
        with http_calls.Later(self.router.url, CHAT, body) as stream:
            self.until(self.handed_over, 30, 0.02)
            held = self.p.metrics().usage_blocks()
            self.gate.release()
            stream.lines(10)  # an event is a line and an empty line
        self.freed("a client leaves a stream after 5 events", held)
        made = int(self.d.metrics().sum("vllm:generation_tokens_total") - made)
        self.report.row("… tokens made of 3500", "fewer than 1000", made, made < 1000)

    def gone_unstreamed(self):
        """Nothing shows that such a decode was admitted: it is cut after pd.abort_delay."""
        body = {**prompts.chat(prompts.text()), "max_tokens": 3500, "ignore_eos": True}
        made = self.d.metrics().sum("vllm:generation_tokens_total")
        left, held = self.held_at_decode(body)
        self.gate.release()
        left.close()
        self.freed("a client leaves a decode that is not streamed", held)
        made = int(self.d.metrics().sum("vllm:generation_tokens_total") - made)
        self.report.row("… tokens made of 3500", "fewer than 3500", made, made < 3500)

    def around_prefill(self, url, body, leave):
        """Sends ANY_TIME requests, each with leave after another time around that at which
        prefill answers."""
        begun = time.monotonic()
        http_calls.post(self.p.url, CHAT, prompts.chat(prompts.text()) | {"max_tokens": 1})
        took = time.monotonic() - begun
        for i in range(ANY_TIME):
            connection = http_calls.send(url, CHAT, prompts.chat(prompts.text()) | body(i))
            time.sleep(took * (0.4 + 1.2 * i / ANY_TIME))
            leave(connection)

    def gone_any_time(self):
        """Around the moment at which prefill answers: the handle of an answer that was
        on its way is still read, and its blocks given back."""
        n = ANY_TIME
        before = self.ours("sluice_fallbacks_total", kind="abandoned_handle")
        self.around_prefill(self.router.url, lambda i: {"stream": bool(i % 2)}, lambda connection: connection.close())
        self.freed(f"{n} clients leave about when prefill answers")
        seen = self.ours("sluice_fallbacks_total", kind="abandoned_handle") - before
        self.report.note(f"of those {n}, {seen} left between the legs")

    def invalid(self):
        """Lines in which prefill complains of a notification for blocks that it does not keep."""
        with open(self.p.process.log, encoding="utf-8", errors="replace") as f:
            return sum("invalid KV blocks" in line for line in f)

    def pinned(self):
        """Whether prefill runs anything or holds blocks, which an idle engine does not tell."""
        http_calls.post(self.p.url, "/v1/completions", {"model": "tiny", "prompt": [300], "max_tokens": 1})
        prefill = self.p.metrics()
        return prefill.sum("vllm:num_requests_running") > 0 or prefill.usage_blocks() > 0

    def late(self):
        """Half of the clients leave about when prefill answers, half at any time; half ask
        for a stream. The engine pins the blocks before it answers."""
        self.report.note(f"then {LATE} clients that leave late, {TOGETHER} at a time: `sluice serve --prefill URL,id=p1 --decode URL,id=d1` with the default settings")
        self.start("router-late", ["--prefill", f"{self.p.url},id=p1", "--decode", f"{self.d.url},id=d1"])
        try:
            self.settle()
            self.leave_late(random.Random(300))
        finally:
            self.router.process.stop(5)

    def leave_late(self, chance):
        body = lambda streamed: prompts.chat(prompts.text()) | {"ignore_eos": True, "stream": streamed}  # noqa: E731
        begun = time.monotonic()
        http_calls.post(self.p.url, CHAT, body(False) | {"max_tokens": 1})
        prefill = time.monotonic() - begun
        begun = time.monotonic()
        self.router.ask(CHAT, body(False))
        whole = time.monotonic() - begun
        before = {"expired": self.count("nixl_num_kv_expired_reqs_total"), "invalid": self.invalid()}
        given_back = self.ours("sluice_fallbacks_total", kind="abandoned_handle")

        def one(i):
            connection = http_calls.send(self.router.url, CHAT, body(bool(i % 2)))
            time.sleep(chance.uniform(0.5, 1.6) * prefill * TOGETHER / 2 if i % 4 < 2 else chance.uniform(0.2, 1.2) * whole)
            connection.close()

        took = []
        for first in range(0, LATE, TOGETHER):
            clients = [threading.Thread(target=one, args=(first + i,)) for i in range(TOGETHER)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            took.append(self.until(lambda: not self.pinned(), LEASE + 15, 0.02) or 0)
        took.sort()
        seen = f"median {statistics.median(took):.2f} s, at most {took[-1]:.2f} s"
        self.report.row(
            f"{LATE} clients leave late: from a group's end until prefill keeps no block",
            f"median below 1 s, at most {SOON} s (lease {LEASE} s)", seen, statistics.median(took) < 1 and took[-1] < SOON,
        )  # fmt: skip
        self.settle()
        self.report.equal("… leases that ran out on prefill, by its own count", 0, self.count("nixl_num_kv_expired_reqs_total") - before["expired"])
        self.report.equal("… lines of prefill's log about invalid KV blocks", 0, self.invalid() - before["invalid"])
        given_back = self.ours("sluice_fallbacks_total", kind="abandoned_handle") - given_back
        self.report.note(f"of those {LATE}, {given_back} left before decode was sent; {sum(t > 1 for t in took)} of {len(took)} groups took more than 1 s")

    def lease(self):
        self.report.note(
            f"then two ways to one decode engine, `--decode GATE,id=dead --decode URL,id=d1`, timeouts.connect {CONNECT} s: the gate leaves"
            f" connects unanswered, so what goes there first comes to decode after the lease of {LEASE} s"
        )
        flags = ["--prefill", f"{self.p.url},id=p1", "--decode", f"{self.gate.url},id=dead,kv_events=off", "--decode", f"{self.d.url},id=d1"]
        more = {"SLUICE_TIMEOUTS_CONNECT": f"{CONNECT}s", "SLUICE_SCHEDULE_POLICY": "round_robin", "SLUICE_PD_LEASE": f"{LEASE}s"}
        self.start("router-lease", flags, more)
        try:
            if self.until(lambda: self.ready() == 3, 60) is None:
                raise RuntimeError(f"{self.ready()} of 3 workers are ready")
            with self.report.guarded("lease runs out"):
                self.lease_runs_out()
        finally:
            self.router.process.stop(5)

    def ready(self):
        return http_calls.get(self.router.url, "/metrics").text().count('state="ready"} 1')

    def lease_runs_out(self):
        """One of two requests meets the dead way first: its decode would read what
        prefill has given back, so prefill is run again."""
        self.settle()
        names = ("nixl_num_kv_expired_reqs_total", "nixl_num_notifications_after_expiry_total")
        before = {name: self.count(name) for name in names}
        taken = self.d.metrics().source("external_kv_transfer")
        self.gate.drop()
        bodies = [prompts.chat(prompts.text()) for _ in range(2)]
        answers, times = [None] * 2, [0.0] * 2

        def ask(i):
            begun = time.monotonic()
            answers[i] = self.router.ask(CHAT, bodies[i], {"X-Request-Id": f"lease-{i}"})
            times[i] = time.monotonic() - begun

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.gate.release()
        row = self.report.row
        slow = max(range(2), key=lambda i: times[i])
        row("time of the delayed request", f"more than {LEASE} s", f"{times[slow]:.1f} s", times[slow] > LEASE)
        for i, answer in enumerate(answers):
            seen, expected = prompts.said(CHAT, answer), prompts.said(CHAT, self.alone(CHAT, bodies[i]))
            row(f"text of request {i}", short(expected), short(seen), seen == expected and seen)
        seen = self.ours("sluice_fallbacks_total", kind="lease_expired")
        row("leases the router saw run out", 1, seen, seen == 1)
        with open(self.p.process.log, encoding="utf-8", errors="replace") as f:
            again = f"lease-{slow}-2" in f.read()
        row("its prompt was prefilled again, by prefill's log", True, again, again)
        tokens = sum(a.json()["usage"]["prompt_tokens"] for a in answers)
        seen = int(self.d.metrics().source("external_kv_transfer") - taken)
        row("prompt tokens that decode took from prefill", f"{tokens} (all)", seen, seen == tokens)
        seen = {name: self.count(name) - before[name] for name in names}
        row("on prefill: leases run out, blocks read after it", [1, 0], list(seen.values()), list(seen.values()) == [1, 0])
        status, text = self.router.explain(f"lease-{slow}")
        row("`sluice explain` tells of it", "exit 0, lease_expired", f"exit {status}, {short(text)}", status == 0 and "lease_expired" in text)
