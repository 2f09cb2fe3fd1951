"""A decode engine is killed under the streams it has: another goes on with them."""

import json
import threading
import time

import http_calls
import prompts
from engines import Engine, wait_ready
from report import short
from router import Router

TOKENS = 160
KINDS = (("/v1/chat/completions", prompts.chat), ("/v1/completions", prompts.completions))
EACH = 3


class Stream(threading.Thread):
    """One streamed request, read event by event."""

    def __init__(self, url, path, body):
        super().__init__(daemon=True)
        self.path, self.body = path, {**body, "max_tokens": TOKENS, "ignore_eos": True}
        self.url = url
        self.lines = []
        self.worker = self.migration = ""
        self.error = None

    def run(self):
        asked = {**self.body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with http_calls.Open(self.url, self.path, asked) as answer:
                self.worker = answer.response.headers["X-Sluice-Worker"]
                self.migration = answer.response.headers["X-Sluice-Migration"]
                for line in answer.response:
                    if line.startswith(b"data: "):
                        self.lines.append(line[len(b"data: "):].decode().strip())  # fmt: skip
        except Exception as error:
            self.error = error

    def told(self):
        """Text, usage, and what no good stream has."""
        text, usage, wrong, identities, finishes = "", None, [], set(), 0
        for line in self.lines[:-1]:
            event = json.loads(line)
            if "error" in event:
                wrong.append(event["error"])
                continue
            identities.add((event["id"], event["created"], event["model"], event["object"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finishes += choice["finish_reason"] is not None
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if choice.get("token_ids") is not None:
                    wrong.append("token ids that nobody asked for")
        if self.error or self.lines[-1:] != ["[DONE]"] or len(identities) != 1 or finishes != 1:
            wrong.append(f"{self.error}, last {self.lines[-1:]}, {len(identities)} identities, {finishes} finishes")
        return text, usage, wrong


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("A decode engine is killed under its streams")
        prefill = Engine(context.cache, context.run_dir, "migrate-prefill", kv_role="kv_producer")
        self.decodes = {
            name: Engine(context.cache, context.run_dir, f"migrate-{name}", kv_role="kv_consumer") for name in ("d1", "d2")
        }
        try:
            wait_ready([prefill, *self.decodes.values()])
            flags = ["--prefill", f"{prefill.url},id=p1"]
            flags += [f for name, e in self.decodes.items() for f in ("--decode", f"{e.url},id={name}")]
            report.note("router: `sluice serve --prefill URL,id=p1 --decode URL,id=d1 --decode URL,id=d2`")
            self.router = Router(context.router, context.run_dir, "router-migrate", flags)
            self.router.wait_ready()
            end = time.monotonic() + 60  # one decode engine makes it ready; both must be there
            while self.metrics().count('state="ready"} 1') < 3 and time.monotonic() < end:
                time.sleep(0.2)
            with report.guarded("streams of a killed engine go on"):
                self.killed()
        finally:
            if hasattr(self, "router"):
                self.router.process.stop(5)
            for engine in (prefill, *self.decodes.values()):
                engine.stop()

    def metrics(self):
        return http_calls.get(self.router.url, "/metrics").text()

    def killed(self):
        streams = [Stream(self.router.url, path, make(prompts.text())) for path, make in KINDS for _ in range(EACH)]
        for stream in streams:
            stream.start()
        end = time.monotonic() + 120
        while any(len(s.lines) < 12 and s.is_alive() for s in streams) and time.monotonic() < end:
            time.sleep(0.01)
        by = [s.worker for s in streams]
        victim = max(self.decodes, key=by.count)
        self.report.row("streams by decode engine before the kill", "some each, or all on one", by, by.count(victim) > 0)
        had = [len(s.lines) for s in streams if s.worker == victim]
        self.decodes[victim].process.kill()
        for stream in streams:
            stream.join(120)
        self.report.row("events those of the killed engine had by then", f"fewer than {TOKENS}", had, max(had) < TOKENS)
        survivor = next(e for name, e in self.decodes.items() if name != victim)
        for stream in streams:
            text, usage, wrong = stream.told()
            body = {**stream.body, "cache_salt": f"alone-{time.time_ns()}"}
            alone = http_calls.post(survivor.url, stream.path, body)
            expected = prompts.said(stream.path, alone)
            name = f"`{stream.path}` on {stream.worker}{', killed' if stream.worker == victim else ''}: the text of an engine alone"
            self.report.row(name, short(expected), short(text), text == expected and text and not wrong)
            if wrong:
                self.report.note(f"wrong: {wrong}")
            counts = {k: alone.json()["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
            self.report.equal("… and its usage", counts, {k: (usage or {}).get(k) for k in counts})
        done = [line for line in self.metrics().splitlines() if line.startswith("sluice_migrations_total")]
        self.report.equal("migrations counted", [f'sluice_migrations_total{{outcome="done"}} {by.count(victim)}'], done)
