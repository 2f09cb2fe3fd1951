"""A request whose decode leg starts after prefill's lease, with an unmodified vLLM prefill
engine: with transfers.side_channel the router renews the lease.

The decode engine has two addresses, one of which leaves connection attempts unanswered, so
that one of two requests reaches decode after the lease."""

import threading
import time

import http_calls
import prompts
from release import CHAT, EXPIRED, LATE

LEASE = 30  # seconds for which the engine keeps blocks for decode
CONNECT = LEASE + 4  # seconds for which the router tries to connect
FLAGS = "`--decode GATE,id=dead --decode URL,id=d1`"


def environment():
    return {"SLUICE_TIMEOUTS_CONNECT": f"{CONNECT}s", "SLUICE_SCHEDULE_POLICY": "round_robin", "SLUICE_PD_LEASE": f"{LEASE}s"}


def check(report, router, engine, decode, gate, alone):
    before = engine.metrics()
    received = decode.metrics().source("external_kv_transfer")
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
    report.row("duration of the delayed request", f"more than {LEASE} s", f"{times[slow]:.1f} s", times[slow] > LEASE)
    for i, answer in enumerate(answers):
        report.equal(f"text of request {i}", alone(CHAT, bodies[i]), prompts.generated(CHAT, answer))
    with open(engine.process.log, encoding="utf-8", errors="replace") as log:
        again = f"renewed-{slow}-2" in log.read()
    report.equal("its prompt was prefilled again, by prefill's log", False, again)
    tokens = sum(a.json()["usage"]["prompt_tokens"] for a in answers)
    report.equal("prompt tokens that decode received from prefill", tokens, int(decode.metrics().source("external_kv_transfer") - received))
    after = engine.metrics()
    report.equal("on prefill: leases expired, blocks read afterwards", [0, 0], [int(after.sum(name) - before.sum(name)) for name in (EXPIRED, LATE)])
    page = http_calls.get(router.url, "/metrics").text()
    renewed = sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith('sluice_kv_side_channel_total{outcome="renewed"}'))
    report.row("leases that the router renewed, by its metric", f"every 5 s: {LEASE // 5 - 1} or more", int(renewed), renewed >= LEASE // 5 - 1)
