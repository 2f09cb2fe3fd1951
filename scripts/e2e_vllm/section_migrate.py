"""A decode engine is drained, then killed, while it streams; another engine continues its streams."""

import json
import time

import http_calls
import prompts
from engines import Engine, wait_ready
from moving import TOKENS, Stream
from processes import say
from report import short
from rich_streams import RICH_KINDS, RichStream
from router import Router

EACH = 3
# The engine can finish a stream with so few remaining events before the router migrates it.
LAST = 4
ATTEMPTS = 4
CHOSEN = "one of three texts"


def generate(prompt):
    return prompts.generate([3000 + ord(c) for c in prompt])


def messages(prompt):
    return {**prompts.chat(prompt), "system": "go on"}


# Endpoint, its request, and whether the engine's streams contain token ids. If they do not,
# the router tokenizes the text again, which is exact only if each event is one token.
KINDS = (
    ("/v1/chat/completions", prompts.chat, True),
    ("/v1/completions", prompts.completions, True),
    ("/inference/v1/generate", generate, True),
    ("/v1/messages", messages, False),
    ("/v1/responses", prompts.responses, False),
)


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("A decode engine is killed during its streams, and one is drained")
        prefill = Engine(context.cache, context.run_dir, "migrate-prefill", kv_role="kv_producer")
        self.decodes = {
            name: Engine(context.cache, context.run_dir, f"migrate-{name}", kv_role="kv_consumer") for name in ("d1", "d2")
        }
        try:
            wait_ready([prefill, *self.decodes.values()])
            allow = ["migration.drain_delay=0s", "migration.allow=logprobs,multiple_choices", "migration.structured=exact"]
            flags = [f for setting in allow for f in ("--set", setting)] + ["--prefill", f"{prefill.url},id=p1"]
            flags += [f for name, e in self.decodes.items() for f in ("--decode", f"{e.url},id={name}")]
            report.note("router: `sluice serve " + " ".join(f"--set {setting}" for setting in allow) + " --prefill URL,id=p1 --decode URL,id=d1 --decode URL,id=d2`")
            self.router = Router(context.router, context.run_dir, "router-migrate", flags)
            self.router.wait_ready()
            self.all_ready()  # the router is ready with one decode engine; the checks need both
            with report.guarded("streams of a drained worker migrate"):
                self.drained()
            with report.guarded("streams of a killed engine continue"):
                self.killed()
        finally:
            if hasattr(self, "router"):
                self.router.process.stop(5)
            for engine in (prefill, *self.decodes.values()):
                engine.stop()

    def metrics(self):
        return http_calls.get(self.router.url, "/metrics").text()

    def counted(self, outcome):
        for line in self.metrics().splitlines():
            if line.startswith(f'sluice_migrations_total{{outcome="{outcome}"}}'):
                return int(float(line.rsplit(" ", 1)[1]))
        return 0

    def begin(self, events, chosen):
        """Starts streams of every kind; returns them, their workers, and the worker of the chosen kind."""
        streams = [Stream(self.router.url, path, make(prompts.text()), ids) for path, make, ids in KINDS for _ in range(EACH)]
        streams += [RichStream(self.router.url, kind) for kind in RICH_KINDS]
        for stream in streams:
            stream.start()
        end = time.monotonic() + 120
        while any(len(s.lines) < events and s.is_alive() for s in streams) and time.monotonic() < end:
            time.sleep(0.01)
        return streams, [s.worker for s in streams], next(s.worker for s in streams if s.name == chosen)

    def begin_some(self, events, chosen):
        """Calls begin, again if the chosen stream ended before the last one started, as on a busy machine."""
        for attempt in range(ATTEMPTS):
            streams, by, victim = self.begin(events, chosen)
            if any(s.is_alive() and s.name == chosen for s in streams):
                break
            say(f"{chosen} ended before the last stream started (attempt {attempt + 1} of {ATTEMPTS})")
            for stream in streams:
                stream.join(120)
        return streams, by, victim

    @staticmethod
    def under_way(streams, victim):
        """Returns the streams that a stopped engine has not finished, once its last output was read."""
        seen, quiet = None, 0
        while quiet < 5:
            time.sleep(0.1)
            lines = [len(s.lines) for s in streams if s.worker == victim]
            quiet, seen = quiet + 1 if lines == seen else 0, lines
        return [s for s in streams if s.worker == victim and s.is_alive()]

    def drain(self, name, on):
        with open(self.router.runtime_file) as file:
            runtime = json.load(file)
        path = f"/admin/v1/workers/{name}/drain?on={str(on).lower()}"
        answer = http_calls.post("http://" + runtime["address"], path, {}, {"Authorization": f"Bearer {runtime['token']}"})
        if answer.status != 200:
            raise RuntimeError(f"drain answered {answer.status}: {answer.text()[:200]}")

    def drained(self):
        """Drains a worker; each stream must have the text of an engine alone, wherever it ended."""
        for attempt in range(ATTEMPTS):
            streams, by, victim = self.begin_some(6, CHOSEN)
            was = self.counted("drained")
            # The engine is stopped, so that no stream ends between under_way and the drain.
            with self.decodes[victim].process.stopped():
                there = self.under_way(streams, victim)
                had = {s: len(s.lines) for s in there}
                self.drain(victim, True)
            for stream in streams:
                stream.join(120)
            moved = self.counted("drained") - was
            with_ids = [s for s in there if s.has_ids and len(s.lines) - had[s] > LAST]
            if any(s.name == CHOSEN for s in with_ids):
                break
            say(f"{CHOSEN} ended, or nearly, before the drain: {len(there)} streams were running, {moved} migrated (attempt {attempt + 1} of {ATTEMPTS})")
            self.restore(victim)
        self.report.row("streams by decode engine before the drain", "at least 1 on the drained one", by, by.count(victim) > 0)
        self.report.row("streams that migrated", f"{len(with_ids)} or more, of {len(there)}, at least 1", moved, 0 < len(with_ids) <= moved <= len(there))
        self.report.note(f"streams without ids stayed if their text did not tokenize to the same tokens: {self.counted('retokenized')} attempts without effect")
        survivor = next(e for name, e in self.decodes.items() if name != victim)
        for stream in streams:
            self.compare(stream, survivor, ", drained" if stream in there else "")
        self.restore(victim)

    def restore(self, name):
        """Ends the drain and waits until the worker is ready."""
        self.drain(name, False)
        self.all_ready()

    def all_ready(self):
        end = time.monotonic() + 60
        while self.metrics().count('state="ready"} 1') < 3 and time.monotonic() < end:
            time.sleep(0.2)

    def killed(self):
        was, lost_before, half_before = (self.counted(outcome) for outcome in ("done", "retokenized", "incomplete_character"))
        streams, by, victim = self.begin_some(12, "two choices")
        self.report.row("streams by decode engine before the kill", "at least 1 on the killed one", by, by.count(victim) > 0)
        process = self.decodes[victim].process
        with process.stopped():
            there = self.under_way(streams, victim)
            had = [len(s.lines) for s in there]
            process.kill()
        for stream in streams:
            stream.join(120)
        self.report.row("events that the streams of the killed engine had by then", f"fewer than {TOKENS}", had, bool(had) and min(had) < TOKENS)
        survivor = next(e for name, e in self.decodes.items() if name != victim)
        lost = [s for s in there if not s.has_ids and s.broke()]
        half = [s for s in there if s.has_ids and s.broke()]
        for stream in streams:
            if stream not in lost + half:
                self.compare(stream, survivor, ", killed" if stream in there else "")
        self.report.equal("streams without ids that ended with an error, each counted as retokenized", len(lost), self.counted("retokenized") - lost_before)
        # A model of random weights sometimes generates half a character; the kill can come right after it.
        self.report.equal("streams with ids that ended with an error, each counted as incomplete_character", len(half), self.counted("incomplete_character") - half_before)
        self.report.equal("migrations counted", len(there) - len(lost) - len(half), self.counted("done") - was)

    def compare(self, stream, engine, what):
        text, usage, wrong = stream.result()
        expected, counts = stream.alone(engine.url)
        name = f"{stream.name} on {stream.worker}{what}: the {stream.what} of an engine alone"
        self.report.row(name, short(str(expected)), short(str(text)), text == expected and text and not wrong)
        if wrong:
            self.report.note(f"wrong: {wrong}")
        if text != expected:
            self.report.note(f"{name}: {difference(str(expected), str(text))}")
        self.report.equal("… and its usage", counts, usage)
        if isinstance(stream, RichStream) and stream.values:
            apart = max((abs(a - b) for a, b in zip(stream.values, stream.values_alone)), default=1)
            same = len(stream.values) == len(stream.values_alone)
            self.report.row("… and its log-probabilities, except for noise", f"{len(stream.values_alone)} values, at most 0.01 apart", f"{len(stream.values)} values, {apart:.5f} apart", same and apart < 0.01)


def difference(expected, seen):
    """Describes the first difference of two texts; a table cell shows only their ends."""
    at = next((i for i, (a, b) in enumerate(zip(expected, seen)) if a != b), min(len(expected), len(seen)))
    return f"expected {expected[max(at - 40, 0) : at + 80]!r} at {at} of {len(expected)}, seen {seen[max(at - 40, 0) : at + 80]!r} of {len(seen)}"
