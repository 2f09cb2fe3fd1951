"""Clients that disconnect in each phase of a hand-over, and a decode leg that starts after the
lease. The prefill engine's metrics show which blocks stay in use."""

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
LEASE = 30  # seconds for which the prefill engine keeps blocks for decode
SOON = 20  # seconds within which blocks must be free; the first hand-over is slow on a busy machine
ANY_TIME = 24  # clients that disconnect around prefill's answer
LATE = 300  # clients that disconnect at any time from just before prefill's answer
TOGETHER = 4  # how many of them run concurrently
CONNECT = 32  # seconds for which the router tries to connect, for lease_runs_out


class Departures:
    """Checks with the prefill and decode engines of section pd; idle and alone are functions of
    that section."""

    def __init__(self, context, prefill, decode, idle, alone):
        self.context = context
        self.report = context.report
        self.p = prefill
        self.d = decode
        self.idle = idle
        self.alone = alone

    def run(self):
        self.report.section("Clients disconnect in each phase, and a lease expires")
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
        self.report.note("router: `sluice serve --prefill URL,id=p1 --decode GATE,id=d1`; the gate is a TCP relay in front of decode")
        flags = ["--prefill", f"{self.p.url},id=p1", "--decode", f"{self.gate.url},id=d1"]
        # By default an abandoned decode that is not streamed continues for a while; here it is cancelled early.
        self.start("router-departures", flags, {"SLUICE_PD_ABANDONED_DECODE_TIMEOUT": "1s"})
        try:
            for check in (self.gone_in_prefill, self.gone_between, self.gone_at_the_head, self.gone_near_the_head, self.gone_in_decode, self.gone_unstreamed, self.gone_any_time):
                with self.report.guarded(check.__name__.replace("_", " ")):
                    self.settle()
                    expired = self.count("nixl_num_kv_expired_reqs_total")
                    check()
                    seen = self.count("nixl_num_kv_expired_reqs_total") - expired
                    self.report.equal("… leases that expired on prefill, by its metric", 0, seen)
        finally:
            self.router.process.stop(5)

    def start(self, name, flags, more=None):
        # The gate delays probes too, so probes are rare and tolerant.
        patient = {"SLUICE_HEALTH_INTERVAL": "10m", "SLUICE_HEALTH_TIMEOUT": "1m", "SLUICE_HEALTH_UNHEALTHY_THRESHOLD": "1000"}
        self.router = Router(self.context.router, self.context.run_dir, name, flags, {**patient, **(more or {})})
        self.router.wait_ready()

    def count(self, name):
        return int(self.p.metrics().sum("vllm:" + name))

    def ours(self, name, **labels):
        """Returns the value of a counter of the router."""
        return int(Metrics(http_calls.get(self.router.url, "/metrics").text()).sum(name, **labels))

    def settle(self):
        if self.until(self.idle, LEASE + 15) is None:
            raise RuntimeError("the engines still have blocks in use")

    def until(self, condition, timeout, pause=0.1):
        """Returns the seconds until condition() is true, or None after `timeout` seconds."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > timeout:
                return None
            time.sleep(pause)
        return time.monotonic() - begun

    def freed(self, what, held=None, limit=SOON):
        """Adds a row with the time until neither engine has a block in use. held is the number of
        blocks that prefill had in use before, or None if there need not have been any."""
        took = self.until(self.idle, LEASE + 15)
        seen = "never" if took is None else f"{took:.1f} s"
        ok = took is not None and took < limit
        if held is None:
            self.report.row(f"{what}: time until no block was in use", f"within {limit} s (lease {LEASE} s)", seen, ok)
            return
        ok = ok and held > 0
        self.report.row(
            f"{what}: blocks in use at prefill before, and time until all were free",
            f"more than 0, within {limit} s (lease {LEASE} s)", f"{held}, {seen}", ok,
        )  # fmt: skip

    def long(self, **more):
        """Returns a request whose prompt fills most of the context, so that prefill takes long."""
        return {**prompts.chat(prompts.text(1100)), **more}

    def leave(self, connections):
        for connection in connections:
            connection.close()

    def gone_in_prefill(self):
        """Several long prompts at once: the last prefill has not begun when all clients disconnect.
        It waits in the router's queue, or in the engine if the engine has room for it."""
        n = 4
        before = self.unstarted()
        left = [http_calls.send(self.router.url, CHAT, self.long(stream=bool(i % 2))) for i in range(n)]
        running = self.until(lambda: self.p.metrics().sum("vllm:num_requests_running") > 0, 5, 0.02)
        held = self.p.metrics().usage_blocks()
        self.leave(left)
        self.freed(f"{n} clients leave while prefill runs", held)
        gone = self.unstarted() - before
        seen = f"{gone}{'' if running is not None else ', and no request was seen running'}"
        self.report.row(
            "… prefill legs cancelled and requests taken out of the queue, by the router's metrics",
            "at least 1", seen, gone >= 1,
        )  # fmt: skip

    def unstarted(self):
        """Returns how many requests of clients that left were cancelled before their prefill ended."""
        cancelled = self.ours("sluice_legs_total", leg="prefill", outcome="client_gone")
        return cancelled + self.ours("sluice_admission_ended_total", outcome="client_gone")

    def waiting_at_decode(self, body):
        """Sends a request and returns when its prefill has answered and its decode waits in the gate."""
        self.gate.hold()
        left = http_calls.send(self.router.url, CHAT, body)
        if self.until(self.handed_over, 30, 0.02) is None:
            raise RuntimeError("decode was not sent")
        return left, self.p.metrics().usage_blocks()

    def handed_over(self):
        """Reports whether prefill has answered and keeps its blocks, and bytes wait in the gate.
        The bytes alone could be a probe."""
        prefill = self.p.metrics()
        return self.gate.delayed > 0 and prefill.usage_blocks() > 0 and not prefill.sum("vllm:num_requests_running")

    def gone_between(self):
        """The decode leg was sent, but its engine does not have it yet. The router must not cancel
        it before that, or nothing would release prefill's blocks."""
        left, held = self.waiting_at_decode(prompts.chat(prompts.text()) | {"stream": True})
        left.close()
        time.sleep(1)
        self.gate.release()
        self.freed("a client leaves before decode's engine has its request", held)

    def gone_at_the_head(self):
        """Clients disconnect after the head of decode's stream, which this engine sends before its
        core has the request."""
        n, chance = 24, random.Random(24)
        for _ in range(n):
            with http_calls.Open(self.router.url, CHAT, self.streamed()):
                time.sleep(chance.random() * 0.004)
        self.freed(f"{n} clients leave a stream after its head")

    def gone_near_the_head(self):
        """Clients disconnect around the time of the head, some before and some after it."""
        n, chance = 24, random.Random(25)
        begun = time.monotonic()
        with http_calls.Open(self.router.url, CHAT, self.streamed()):
            took = time.monotonic() - begun
        for _ in range(n):
            left = http_calls.send(self.router.url, CHAT, self.streamed())
            time.sleep(took * (0.7 + 0.5 * chance.random()))
            left.close()
        self.freed(f"{n} clients leave around the time of a stream's head")

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
        self.report.row("… tokens generated of 3500", "fewer than 1000", made, made < 1000)

    def gone_unstreamed(self):
        """Without a stream nothing shows that decode has begun; the router cancels it after pd.abort_delay."""
        body = {**prompts.chat(prompts.text()), "max_tokens": 3500, "ignore_eos": True}
        made = self.d.metrics().sum("vllm:generation_tokens_total")
        left, held = self.waiting_at_decode(body)
        self.gate.release()
        left.close()
        self.freed("a client leaves a decode that is not streamed", held)
        made = int(self.d.metrics().sum("vllm:generation_tokens_total") - made)
        self.report.row("… tokens generated of 3500", "fewer than 3500", made, made < 3500)

    def around_prefill(self, url, body, leave):
        """Sends ANY_TIME requests and calls leave for each at a different time around prefill's answer."""
        begun = time.monotonic()
        http_calls.post(self.p.url, CHAT, prompts.chat(prompts.text()) | {"max_tokens": 1})
        took = time.monotonic() - begun
        for i in range(ANY_TIME):
            connection = http_calls.send(url, CHAT, prompts.chat(prompts.text()) | body(i))
            time.sleep(took * (0.4 + 1.2 * i / ANY_TIME))
            leave(connection)

    def gone_any_time(self):
        """Clients disconnect around the time of prefill's answer. The router still reads an answer
        that is on its way, and releases the blocks of its handle."""
        n = ANY_TIME
        before = self.ours("sluice_fallbacks_total", kind="abandoned_handle")
        self.around_prefill(self.router.url, lambda i: {"stream": bool(i % 2)}, lambda connection: connection.close())
        self.freed(f"{n} clients leave around the time of prefill's answer")
        seen = self.ours("sluice_fallbacks_total", kind="abandoned_handle") - before
        self.report.note(f"of these {n}, {seen} left between the legs")

    def invalid(self):
        """Returns the number of lines in which prefill reports a notification for unknown blocks."""
        with open(self.p.process.log, encoding="utf-8", errors="replace") as f:
            return sum("invalid KV blocks" in line for line in f)

    def pinned(self):
        """Reports whether prefill runs a request or has blocks in use. The small request makes an
        idle engine update its gauges."""
        http_calls.post(self.p.url, "/v1/completions", {"model": "tiny", "prompt": [300], "max_tokens": 1})
        prefill = self.p.metrics()
        return prefill.sum("vllm:num_requests_running") > 0 or prefill.usage_blocks() > 0

    def late(self):
        """Half of the clients disconnect around prefill's answer, half at any time; half of the
        requests are streams. The engine pins the blocks before it answers."""
        self.report.note(f"then {LATE} clients that leave late, {TOGETHER} concurrently: `sluice serve --prefill URL,id=p1 --decode URL,id=d1` with the default settings")
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
            f"{LATE} clients leave late: time from a group's end until prefill keeps no block",
            f"median below 1 s, at most {SOON} s (lease {LEASE} s)", seen, statistics.median(took) < 1 and took[-1] < SOON,
        )  # fmt: skip
        self.settle()
        self.report.equal("… leases that expired on prefill, by its metric", 0, self.count("nixl_num_kv_expired_reqs_total") - before["expired"])
        self.report.equal("… lines of prefill's log about invalid KV blocks", 0, self.invalid() - before["invalid"])
        given_back = self.ours("sluice_fallbacks_total", kind="abandoned_handle") - given_back
        self.report.note(f"of these {LATE}, {given_back} left before decode was sent; {sum(t > 1 for t in took)} of {len(took)} groups took more than 1 s")

    def lease(self):
        self.report.note(
            f"then two addresses of one decode engine, `--decode GATE,id=dead --decode URL,id=d1`, timeouts.connect {CONNECT} s: the gate leaves"
            f" connection attempts unanswered, so a request that goes there first reaches decode after the lease of {LEASE} s"
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
        """One of two requests tries the dead address first. Its decode would read blocks that
        prefill has freed, so the router runs prefill again."""
        self.settle()
        names = ("nixl_num_kv_expired_reqs_total", "nixl_num_notifications_after_expiry_total")
        before = {name: self.count(name) for name in names}
        received = self.d.metrics().source("external_kv_transfer")
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
        row("duration of the delayed request", f"more than {LEASE} s", f"{times[slow]:.1f} s", times[slow] > LEASE)
        for i, answer in enumerate(answers):
            seen, expected = prompts.generated(CHAT, answer), prompts.generated(CHAT, self.alone(CHAT, bodies[i]))
            row(f"text of request {i}", short(expected), short(seen), seen == expected and seen)
        seen = self.ours("sluice_fallbacks_total", kind="lease_expired")
        row("leases that the router considered expired", 1, seen, seen == 1)
        with open(self.p.process.log, encoding="utf-8", errors="replace") as f:
            again = f"lease-{slow}-2" in f.read()
        row("its prompt was prefilled again, by prefill's log", True, again, again)
        tokens = sum(a.json()["usage"]["prompt_tokens"] for a in answers)
        seen = int(self.d.metrics().source("external_kv_transfer") - received)
        row("prompt tokens that decode received from prefill", f"{tokens} (all)", seen, seen == tokens)
        seen = {name: self.count(name) - before[name] for name in names}
        row("on prefill: leases expired, blocks read afterwards", [1, 0], list(seen.values()), list(seen.values()) == [1, 0])
        status, text = self.router.explain(f"lease-{slow}")
        row("`sluice explain` shows it", "exit 0, lease_expired", f"exit {status}, {short(text)}", status == 0 and "lease_expired" in text)
