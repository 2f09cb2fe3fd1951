"""Blocks of abandoned requests at an unmodified vLLM prefill engine.

Decode refuses connections as soon as prefill has answered, so the router has a handle that
no decode engine will read. The engine's metrics show what happens to the blocks."""

import threading
import time

import http_calls
import prompts

CHAT = "/v1/chat/completions"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
LATE = "vllm:nixl_num_notifications_after_expiry_total"


class Usage:
    """Samples the engine's KV usage continuously."""

    def __init__(self, engine):
        self._engine = engine
        self._ended = threading.Event()
        self.seen = []  # (monotonic, blocks)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._ended.wait(0.02):
            blocks = self._engine.metrics().usage_blocks()
            self.seen.append((time.monotonic(), blocks))

    def now(self):
        return self.seen[-1][1] if self.seen else 0

    def end(self):
        self._ended.set()
        self._thread.join()

    def empty_after(self, since):
        """Returns the seconds from then until the first sample without a block in use."""
        return next((at - since for at, blocks in self.seen if at > since and blocks == 0), None)

    def most(self, since):
        return max((blocks for at, blocks in self.seen if at > since), default=0)


class Abandoned:
    """Checks of a router in front of a prefill engine (behind tap) and a decode engine (behind gate)."""

    def __init__(self, report, engine, tap, gate, alone):
        self.report, self.engine, self.tap, self.gate, self.alone = report, engine, tap, gate, alone

    def abandon(self, router, count):
        """Sends requests whose decode engine cannot be reached; returns the status and the times
        of the handles of each."""
        last = []
        for _ in range(count):
            handles = []

            def shut(handles=handles):
                self.gate.shut()
                handles.append(time.monotonic())

            self.tap.on_handle = shut
            answer = router.ask(CHAT, prompts.chat(prompts.text(200)))
            self.tap.on_handle = None
            last.append((answer.status, handles))
            self.gate.open()
            self.decode_back(router)
        return last

    @staticmethod
    def decode_back(router):
        router.wait_ready(60)
        # The health check must find the decode engine again, and its breaker must close.
        for _ in range(100):
            answer = router.ask(CHAT, prompts.chat(prompts.text(20)))
            if answer.status == 200 and answer.headers.get("X-Sluice-Prefill-Worker"):
                return
            time.sleep(0.2)
        raise RuntimeError(f"no hand-over after the gate was opened: {answer.status} {answer.text()[:200]}")

    def released(self, router):
        report, engine = self.report, self.engine
        self.decode_back(router)
        before = engine.metrics()
        # Another client's requests run on the same engine while blocks are released.
        others, stop = [], threading.Event()
        body = prompts.chat(prompts.text(120))
        expected = prompts.generated(CHAT, http_calls.post(engine.url, CHAT, body))

        def work():
            while not stop.is_set():
                others.append(prompts.generated(CHAT, http_calls.post(engine.url, CHAT, body)) == expected)

        usage = Usage(engine)
        try:
            idle = self.abandon(router, 4)
            time.sleep(1.2)
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            busy = self.abandon(router, 3)
            stop.set()
            thread.join()
            time.sleep(1.2)
        finally:
            stop.set()
            usage.end()
        took = [[usage.empty_after(at) for at in handles] for _, handles in idle]
        flat = [t for per_request in took for t in per_request]
        report.row("4 requests whose decode refuses connections: abandoned hand-overs", "at least 4", len(flat), len(flat) >= 4)
        pinned = [usage.most(handles[0]) for _, handles in idle]
        report.row("their blocks were in use", "each above 5", pinned, min(pinned) > 5)
        known = [t for t in flat if t is not None]
        worst = f"{max(known):.2f} s" if len(known) == len(flat) else f"{len(flat) - len(known)} never"
        report.row(
            "from prefill's answer to no block in use, on an idle engine", "below 1 s each",
            f"at most {worst}", len(known) == len(flat) and max(known) < 1,
        )  # fmt: skip
        report.note("from prefill's answer to no block in use: " + ", ".join(f"{t * 1000:.0f} ms" for t in known))
        after = engine.metrics()
        report.equal("requests of another client on the same engine at that time, with the right text", len(others), sum(others))
        report.equal("blocks in use at the end", 0, after.usage_blocks())
        report.equal("leases that expired unread, by the engine's metric", 0, int(after.sum(EXPIRED) - before.sum(EXPIRED)))
        report.equal("releases for requests that the engine no longer had", 0, int(after.sum(LATE) - before.sum(LATE)))
        report.note(f"abandoned hand-overs while another client's requests ran: {sum(len(h) for _, h in busy)}; its requests: {len(others)}")
        same = 0
        for i in range(4):
            body = prompts.chat(prompts.text(60 + 30 * i))
            answer = router.ask(CHAT, body)
            same += answer.headers.get("X-Sluice-Prefill-Worker") is not None and prompts.generated(CHAT, answer) == self.alone(CHAT, body)
        report.equal("4 hand-overs afterwards have the text of decode alone", 4, same)

    def kept(self, router):
        """The same without release: the blocks stay in use until the lease ends."""
        self.decode_back(router)
        usage = Usage(self.engine)
        try:
            ((_, handles),) = self.abandon(router, 1)
            end = time.monotonic() + 60
            while usage.empty_after(handles[-1]) is None and time.monotonic() < end:
                time.sleep(0.2)
        finally:
            usage.end()
        took = usage.empty_after(handles[-1])
        self.report.row(
            "with transfers.side_channel off, the blocks are in use until the lease ends", "about 30 s",
            "never freed" if took is None else f"{took:.1f} s", took is not None and took > 10,
        )  # fmt: skip
