"""Streams are suspended for requests of a higher class, again and again, and go on where they stopped."""

import json
import os
import time

import http_calls
import prompts
from engines import Engine, wait_ready
from moving import TOKENS, Stream
from report import short
from rich_streams import RICH_KINDS, RichStream
from router import Router
from section_migrate import KINDS, difference

EACH = 3
# How often a stream is suspended, at most: a request of the higher class is sent after so many more events.
ROUNDS, EVENTS = 12, 7
CONFIG = {
    "limits": {"rank_requests": 1},
    "admission": {
        "preemption": True,
        "max_preemptions": 1000,
        "preemption_interval": "0s",
        "trusted": ["any"],
        "classes": [{"name": "high"}, {"name": "low"}],
        "default_class": "low",
    },
}


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("Streams are suspended for requests of a higher class")
        self.engine = Engine(context.cache, context.run_dir, "preempt")
        try:
            wait_ready([self.engine])
            path = os.path.join(context.run_dir, "preempt.yaml")
            with open(path, "w") as file:
                json.dump({**CONFIG, "workers": [{"id": "a1", "url": self.engine.url}]}, file)
            report.note(f"router: `sluice serve --config FILE` with one worker and `{json.dumps(CONFIG)}`")
            self.router = Router(context.router, context.run_dir, "router-preempt", ["--config", path])
            self.router.wait_ready()
            for kind, make, has_ids in KINDS:
                if has_ids:  # text is made into ids once; what the next engine adds has none
                    with report.guarded(f"{kind}: streams are suspended"):
                        self.suspended(kind, make)
            with report.guarded("other streams are not suspended"):
                self.others()
        finally:
            if hasattr(self, "router"):
                self.router.process.stop(5)
            self.engine.stop()

    def counted(self):
        page = http_calls.get(self.router.url, "/metrics").text()
        lines = [line for line in page.splitlines() if line.startswith('sluice_admission_preemptions_total{class="low"}')]
        return int(float(lines[0].rsplit(" ", 1)[1])) if lines else 0

    def request(self):
        """Sends a request of the higher class; returns the time until it was answered."""
        begun = time.monotonic()
        body = {**prompts.completions(prompts.text(8)), "max_tokens": 2}
        answer = http_calls.post(self.router.url, "/v1/completions", body, {"X-Sluice-Priority": "high"})
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.text()[:200]}")
        return time.monotonic() - begun

    def begin(self, stream, events):
        stream.start()
        end = time.monotonic() + 120
        while len(stream.lines) < events and stream.is_alive() and time.monotonic() < end:
            time.sleep(0.002)

    def suspended(self, kind, make):
        before, took, disturbed = self.counted(), [], 0
        for number in range(EACH):
            stream = Stream(self.router.url, kind, make(prompts.text()), True)
            self.begin(stream, 2 + number)
            for _ in range(ROUNDS):
                more, end = len(stream.lines) + EVENTS, time.monotonic() + 120
                while len(stream.lines) < more and stream.is_alive() and time.monotonic() < end:
                    time.sleep(0.002)
                if len(stream.lines) > TOKENS - 2 * EVENTS or not stream.is_alive():
                    break
                took.append(self.request())
                disturbed += stream.is_alive()
            stream.join(120)
            text, usage, wrong = stream.result()
            expected, counts = stream.alone(self.engine.url)
            name = f"{stream.name}: the text of an engine alone"
            self.report.row(name, short(str(expected)), short(str(text)), text == expected and text and not wrong)
            if wrong or text != expected:
                self.report.note(f"{name}: {wrong}, {difference(str(expected), str(text))}")
            self.report.equal("… and its usage", counts, usage)
        suspensions = self.counted() - before
        self.report.row(f"{kind}: suspensions of {EACH} streams", f"{2 * EACH} or more, one for each request", f"{suspensions} for {len(took)} requests", 2 * EACH <= suspensions <= len(took))
        self.report.row("… requests that were answered during the stream", f"{2 * EACH} or more", f"{disturbed} of {len(took)}, median {1000 * sorted(took)[len(took) // 2]:.0f} ms", disturbed >= 2 * EACH)

    def others(self):
        """A stream with log-probabilities may not move: the request waits for its end."""
        before = self.counted()
        stream = RichStream(self.router.url, RICH_KINDS[0])
        # Alone first: the first log-probabilities make the engine's worker compile a kernel with g++. On
        # a busy machine that takes longer than the router waits for an engine core that advances nothing.
        expected, counts = stream.alone(self.engine.url)
        self.begin(stream, 3)
        self.request()
        stream.join(120)
        text, usage, wrong = stream.result()
        self.report.equal("suspensions of a stream with log-probabilities", 0, self.counted() - before)
        self.report.row("… the text of an engine alone", short(str(expected)), short(str(text)), text == expected and text and not wrong)
        self.report.equal("… and its usage", counts, usage)
