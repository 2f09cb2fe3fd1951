"""A decode engine is killed under the streams it has, and one is drained: another goes on with them."""

import json
import threading
import time

import http_calls
import prompts
from engines import Engine, wait_ready
from report import short
from router import Router

TOKENS = 160
EACH = 3


def generate(prompt):
    return prompts.generate([3000 + ord(c) for c in prompt])


def messages(prompt):
    return {**prompts.chat(prompt), "system": "go on"}


# Endpoint, its request, and whether the engine tells token ids on its streams: where it
# does not, text is made ids again, which is exact only where each event is one token.
KINDS = (
    ("/v1/chat/completions", prompts.chat, True),
    ("/v1/completions", prompts.completions, True),
    ("/inference/v1/generate", generate, True),
    ("/v1/messages", messages, False),
    ("/v1/responses", prompts.responses, False),
)


def longer(path, body):
    if path == "/inference/v1/generate":
        return {**body, "sampling_params": {**body["sampling_params"], "max_tokens": TOKENS, "ignore_eos": True}}
    if path == "/v1/responses":
        return {**body, "max_output_tokens": TOKENS}
    if path == "/v1/messages":
        return {**body, "max_tokens": TOKENS}
    return {**body, "max_tokens": TOKENS, "ignore_eos": True}


class Stream(threading.Thread):
    """One streamed request, read event by event."""

    def __init__(self, url, path, body, tells_ids):
        super().__init__(daemon=True)
        self.path, self.body, self.tells_ids = path, longer(path, body), tells_ids
        self.url = url
        self.lines = []
        self.worker = self.migration = ""
        self.error = None

    def run(self):
        asked = {**self.body, "stream": True}
        if self.tells_ids:
            asked["stream_options"] = {"include_usage": True}
        try:
            with http_calls.Open(self.url, self.path, asked) as answer:
                self.worker = answer.response.headers["X-Sluice-Worker"]
                self.migration = answer.response.headers["X-Sluice-Migration"]
                for line in answer.response:
                    if line.startswith(b"data: "):
                        self.lines.append(line[len(b"data: "):].decode().strip())  # fmt: skip
        except Exception as error:
            self.error = error

    def broke(self):
        """Whether the stream ended with an error event."""
        return any('"error"' in line for line in self.lines)

    def told(self):
        """Text (or ids), usage (prompt, output), and what no good stream has."""
        match self.path:
            case "/v1/messages":
                return self.told_messages()
            case "/v1/responses":
                return self.told_responses()
        text, usage, wrong, identities, finishes = "", None, [], set(), 0
        if self.path == "/inference/v1/generate":
            text = []
        for line in self.lines[:-1]:
            event = json.loads(line)
            if "error" in event:
                wrong.append(event["error"])
                continue
            identities.add(tuple(event.get(k) for k in ("id", "request_id", "created", "model", "object")))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finishes += choice.get("finish_reason") is not None
                if self.path == "/inference/v1/generate":
                    text += choice.get("token_ids") or []
                    continue
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if choice.get("token_ids") is not None:
                    wrong.append("token ids that nobody asked for")
        if self.error or self.lines[-1:] != ["[DONE]"] or len(identities) != 1 or finishes != 1:
            wrong.append(f"{self.error}, last {self.lines[-1:]}, {len(identities)} identities, {finishes} finishes")
        return text, usage and (usage["prompt_tokens"], usage["completion_tokens"]), wrong

    def told_messages(self):
        text, usage, wrong, kinds = "", None, [], []
        for event in map(json.loads, self.lines):
            kind = event["type"]
            if not kinds or kinds[-1] != kind:
                kinds.append(kind)
            if kind == "error":
                wrong.append(event)
            elif kind == "content_block_delta":
                text += event["delta"]["text"]
            elif kind == "message_delta":
                usage = (event["usage"]["input_tokens"], event["usage"]["output_tokens"])
        if kinds != ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"]:
            wrong.append(kinds)
        return text, usage, wrong

    def told_responses(self):
        text, usage, wrong = "", None, []
        for number, event in enumerate(map(json.loads, self.lines)):
            if event.get("sequence_number") != number:
                wrong.append(f"event {number} is numbered {event.get('sequence_number')}: {event['type']}")
            if event["type"] == "error":
                wrong.append(event)
            elif event["type"] == "response.output_text.delta":
                text += event["delta"]
            elif event["type"] in ("response.completed", "response.incomplete"):
                end = event["response"]
                usage = (end["usage"]["input_tokens"], end["usage"]["output_tokens"])
                if end["output"][0]["content"][0]["text"] != text:
                    wrong.append(end["output"])
        if usage is None:
            wrong.append(self.lines[-1:])
        return text, usage, wrong


def alone(url, stream):
    """What one engine says to the request: its text and usage."""
    answer = http_calls.post(url, stream.path, {**stream.body, "cache_salt": f"alone-{time.time_ns()}"})
    usage = answer.json()["usage"]
    pairs = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
    return prompts.said(stream.path, answer), next(tuple(usage[k] for k in pair) for pair in pairs if pair[0] in usage)


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("A decode engine is killed under its streams, and one is drained")
        prefill = Engine(context.cache, context.run_dir, "migrate-prefill", kv_role="kv_producer")
        self.decodes = {
            name: Engine(context.cache, context.run_dir, f"migrate-{name}", kv_role="kv_consumer") for name in ("d1", "d2")
        }
        try:
            wait_ready([prefill, *self.decodes.values()])
            flags = ["--set", "migration.drain_after=0s", "--prefill", f"{prefill.url},id=p1"]
            flags += [f for name, e in self.decodes.items() for f in ("--decode", f"{e.url},id={name}")]
            report.note("router: `sluice serve --set migration.drain_after=0s --prefill URL,id=p1 --decode URL,id=d1 --decode URL,id=d2`")
            self.router = Router(context.router, context.run_dir, "router-migrate", flags)
            self.router.wait_ready()
            end = time.monotonic() + 60  # one decode engine makes it ready; both must be there
            while self.metrics().count('state="ready"} 1') < 3 and time.monotonic() < end:
                time.sleep(0.2)
            with report.guarded("streams of a drained worker move"):
                self.drained()
            with report.guarded("streams of a killed engine go on"):
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

    def begin(self, events):
        streams = [Stream(self.router.url, path, make(prompts.text()), ids) for path, make, ids in KINDS for _ in range(EACH)]
        for stream in streams:
            stream.start()
        end = time.monotonic() + 120
        while any(len(s.lines) < events and s.is_alive() for s in streams) and time.monotonic() < end:
            time.sleep(0.01)
        by, running = [s.worker for s in streams], [s.worker for s in streams if s.is_alive()]
        return streams, by, max(self.decodes, key=running.count)

    def begin_some(self, events):
        """begin, again where the streams of both engines were over before the last had begun: on a machine that has other work."""
        for _ in range(4):
            streams, by, victim = self.begin(events)
            if any(s.is_alive() and s.worker == victim for s in streams):
                break
            for stream in streams:
                stream.join(120)
        return streams, by, victim

    def drain(self, name, on):
        with open(self.router.runtime_file) as file:
            runtime = json.load(file)
        path = f"/admin/v1/workers/{name}/drain?on={str(on).lower()}"
        answer = http_calls.post("http://" + runtime["address"], path, {}, {"Authorization": f"Bearer {runtime['token']}"})
        if answer.status != 200:
            raise RuntimeError(f"drain answered {answer.status}: {answer.text()[:200]}")

    def drained(self):
        """Streams of a worker that is drained: all are those of an engine alone, wherever they ended."""
        streams, by, victim = self.begin_some(6)
        self.report.row("streams by decode engine before the drain", "some each, or all on one", by, by.count(victim) > 0)
        over = [s for s in streams if not s.is_alive()]
        self.drain(victim, True)
        for stream in streams:
            stream.join(120)
        moved, there = self.counted("drained"), [s for s in streams if s.worker == victim and s not in over]
        telling = sum(s.tells_ids for s in there)
        self.report.row("streams that moved", f"{telling} and more, of {len(there)}", moved, telling <= moved <= len(there))
        self.report.note(f"streams of text alone stayed where their text is not exactly its tokens: {self.counted('retokenized')} times asked in vain")
        survivor = next(e for name, e in self.decodes.items() if name != victim)
        for stream in streams:
            self.compare(stream, survivor, ", drained" if stream in there else "")
        self.drain(victim, False)
        end = time.monotonic() + 60
        while self.metrics().count('state="ready"} 1') < 3 and time.monotonic() < end:
            time.sleep(0.2)

    def killed(self):
        was, lost_before = self.counted("done"), self.counted("retokenized")
        streams, by, victim = self.begin_some(12)
        self.report.row("streams by decode engine before the kill", "some each, or all on one", by, by.count(victim) > 0)
        over = [s for s in streams if not s.is_alive()]  # one event of generate may hold many tokens
        there = [s for s in streams if s.worker == victim and s not in over]
        had = [len(s.lines) for s in there]
        self.decodes[victim].process.kill()
        for stream in streams:
            stream.join(120)
        self.report.row("events those of the killed engine had by then", f"fewer than {TOKENS}", had, bool(had) and min(had) < TOKENS)
        survivor = next(e for name, e in self.decodes.items() if name != victim)
        lost = [s for s in there if not s.tells_ids and s.broke()]
        for stream in streams:
            if stream not in lost:
                self.compare(stream, survivor, ", killed" if stream in there else "")
        self.report.equal("streams of text alone that ended with an error, each counted as retokenized", len(lost), self.counted("retokenized") - lost_before)
        self.report.equal("migrations counted", len(there) - len(lost), self.counted("done") - was)

    def compare(self, stream, engine, what):
        text, usage, wrong = stream.told()
        expected, counts = alone(engine.url, stream)
        name = f"`{stream.path}` on {stream.worker}{what}: the text of an engine alone"
        self.report.row(name, short(str(expected)), short(str(text)), text == expected and text and not wrong)
        if wrong:
            self.report.note(f"wrong: {wrong}")
        self.report.equal("… and its usage", counts, usage)
