"""A request that the router holds between the legs for longer than prefill's lease,
at a prefill engine of Unmodified vLLM: with transfers.side_channel its blocks are kept.

Two ways lead to one decode engine, and one of them leaves connects unanswered, so
that of two requests one comes to decode after the lease."""

import threading
import time

import http_calls
import prompts
from release import CHAT, EXPIRED, LATE

LEASE = 30  # seconds that the engine keeps blocks for decode
CONNECT = LEASE + 4  # seconds that the router tries to connect
FLAGS = "`--decode GATE,id=dead --decode URL,id=d1`"


def environment():
    return {"SLUICE_TIMEOUTS_CONNECT": f"{CONNECT}s", "SLUICE_SCHEDULE_POLICY": "round_robin", "SLUICE_PD_LEASE": f"{LEASE}s"}


def check(report, router, engine, decode, gate, alone):
    before = engine.metrics()
    taken = decode.metrics().source("external_kv_transfer")
    gate.drop()
    try:
        bodies = [prompts.chat(prompts.text()) for _ in range(2)]
        answers, times = [None] * 2, [0.0] * 2

        def ask(i):
            begun = time.monotonic()
            answers[i] = router.ask(CHAT, bodies[i], {"X-Request-Id": f"renewed-{i}"})
            times[i] = time.monotonic() - begun

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gate.release()
    slow = max(range(2), key=lambda i: times[i])
    report.row("time of the delayed request", f"more than {LEASE} s", f"{times[slow]:.1f} s", times[slow] > LEASE)
    for i, answer in enumerate(answers):
        report.equal(f"text of request {i}", alone(CHAT, bodies[i]), prompts.said(CHAT, answer))
    with open(engine.process.log, encoding="utf-8", errors="replace") as log:
        again = f"renewed-{slow}-2" in log.read()
    report.equal("its prompt was prefilled again, by prefill's log", False, again)
    tokens = sum(a.json()["usage"]["prompt_tokens"] for a in answers)
    report.equal("prompt tokens that decode took from prefill", tokens, int(decode.metrics().source("external_kv_transfer") - taken))
    after = engine.metrics()
    report.equal("on prefill: leases run out, blocks read after it", [0, 0], [int(after.sum(name) - before.sum(name)) for name in (EXPIRED, LATE)])
    page = http_calls.get(router.url, "/metrics").text()
    renewed = sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith('sluice_kv_side_channel_total{outcome="renewed"}'))
    report.row("leases that the router renewed, by its own count", f"every 5 s: {LEASE // 5 - 1} or more", int(renewed), renewed >= LEASE // 5 - 1)
