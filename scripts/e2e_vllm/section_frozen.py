"""An engine freezes while it serves requests: first its whole process group, then only its
engine core. An engine that computes a very long prompt must not be considered frozen."""

import os
import signal
import threading
import time

import http_calls
import prompts
from engines import Engine, wait_ready
from moving import Stream, longer
from router import Router

STREAMS = 4
WHOLE = 4
# The router's default bounds in seconds, and the additional time for the last answer, which
# the other engine completes, on a busy machine.
BOUNDS = {"process": 10, "core": 30}
SLACK = 60
LONG_WORDS = 1100  # about 4,000 tokens
# A model of 400 million random weights, which computes that prompt in one step of 35 s or more.
LARGE = (
    "--load-format", "dummy", "--max-num-batched-tokens", "4096", "--hf-overrides",
    '{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}',
)  # fmt: skip


class Whole(threading.Thread):
    """One request that is not streamed."""

    def __init__(self, url, path, body):
        super().__init__(daemon=True)
        self.url, self.path, self.body = url, path, body
        self.answer = self.error = None
        self.took = 0.0

    def run(self):
        begun = time.monotonic()
        try:
            self.answer = http_calls.post(self.url, self.path, self.body)
        except Exception as error:
            self.error = error
        self.took = time.monotonic() - begun

    def generated(self):
        return prompts.generated(self.path, self.answer) if self.answer else f"{self.error}"


def core_of(engine):
    """Returns the process id of the engine's core, a child process with EngineCore in its title."""
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            if os.getsid(int(pid)) != engine.process.popen.pid:
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                title = file.read().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if "EngineCore" in title:
            return int(pid)
    raise RuntimeError(f"{engine.name} has no process with EngineCore in its title")


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("An engine freezes while it serves requests, and one computes a very long prompt")
        engines = {name: Engine(context.cache, context.run_dir, f"frozen-{name}") for name in ("e1", "e2")}
        large = Engine(context.cache, context.run_dir, "frozen-large", more=LARGE)
        try:
            wait_ready([*engines.values(), large])
            more = {"SLUICE_HEALTH_TIMEOUT": "2s"}
            flags = ["--set", "schedule.policy=round_robin", "--set", "fleet.retry_budget_min_per_second=100"]
            flags += [f for name, e in engines.items() for f in ("--engine", f"{e.url},id={name}")]
            self.router = Router(context.router, context.run_dir, "router-frozen", flags, more)
            report.note("router: `sluice serve --set schedule.policy=round_robin --set fleet.retry_budget_min_per_second=100 --engine URL,id=e1 --engine URL,id=e2`, all bounds at their defaults")
            self.router.wait_ready()
            self.wait_for('state="ready"} 1', 2)
            for _ in range(8):  # both engines serve requests
                self.router.ask("/v1/completions", prompts.completions(prompts.text()))
            pid = engines["e1"].process.popen.pid
            with report.guarded("the whole process group is stopped"):
                self.frozen(engines, "process", lambda s: os.killpg(pid, s))
            core = core_of(engines["e1"])
            with report.guarded("the engine core alone is stopped"):
                self.frozen(engines, "core", lambda s: os.kill(core, s))
            self.router.process.stop(5)
            with report.guarded("a very long prompt"):
                self.long(large, more)
        finally:
            if hasattr(self, "router"):
                self.router.process.stop(5)
            for engine in (*engines.values(), large):
                engine.stop()

    def metrics(self):
        return http_calls.get(self.router.url, "/metrics").text()

    def metric(self, name):
        for line in self.metrics().splitlines():
            if line.startswith(name + " "):
                return int(float(line.rsplit(" ", 1)[1]))
        return 0

    def wait_for(self, text, count, timeout=60):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.metrics().count(text) >= count:
                return True
            time.sleep(0.2)
        return False

    def frozen(self, engines, state, send):
        report, path = self.report, "/v1/chat/completions"
        streams = [Stream(self.router.url, path, prompts.chat(prompts.text()), True) for _ in range(STREAMS)]
        whole = [Whole(self.router.url, path, longer(path, prompts.chat(prompts.text()))) for _ in range(WHOLE)]
        for request in (*streams, *whole):
            request.start()
        end = time.monotonic() + 60
        while any(len(s.lines) < 6 and s.is_alive() for s in streams) and time.monotonic() < end:
            time.sleep(0.01)
        begun = time.monotonic()
        send(signal.SIGSTOP)
        try:
            there = [r for r in (*streams, *whole) if r.is_alive()]
            held = [s for s in streams if s.is_alive() and s.worker == "e1"]
            for request in (*streams, *whole):
                request.join(BOUNDS[state] + SLACK + 60)
            took = time.monotonic() - begun
            cut = self.metric(f'sluice_engine_frozen_calls_total{{state="{state}"}}')
            what = {"process": "SIGSTOP of its whole process group", "core": "SIGSTOP of its EngineCore process alone"}[state]
            report.row(f"{what}: running requests, and streams on the frozen engine", "at least 1 each", f"{len(there)}, {len(held)}", len(there) > 0 and len(held) > 0)
            report.equal("verdicts", 1, self.metric(f'sluice_engine_frozen_total{{state="{state}"}}'))
            report.row("calls that the router cancelled", "at least 1", cut, cut > 0)
            bound = BOUNDS[state]
            report.row("seconds until the last answer", f"{bound} to {bound + SLACK}", f"{took:.1f}", bound - 2 <= took <= bound + SLACK)
            for stream in streams:
                text, _, wrong = stream.result()
                expected, _ = stream.alone(engines["e2"].url)
                report.row(f"a stream{' on the frozen engine' if stream in held else ''}: the text of an engine alone", f"{len(expected)} characters", f"{len(text)}, wrong: {wrong}", text == expected and not wrong)
            for request in whole:
                alone = http_calls.post(engines["e2"].url, path, {**request.body, "cache_salt": f"alone-{time.time_ns()}"})
                expected = prompts.generated(path, alone)
                report.row("a whole answer: the text of an engine alone", f"{len(expected)} characters", f"{len(request.generated())}, after {request.took:.1f} s", request.generated() == expected)
            by = {self.router.ask(path, prompts.chat(prompts.text())).headers["X-Sluice-Worker"] for _ in range(4)}
            report.equal("workers that serve requests while it is frozen", {"e2"}, by)
        finally:
            send(signal.SIGCONT)
        begun, again = time.monotonic(), False
        while not again and time.monotonic() - begun < 60:
            again = self.router.ask(path, prompts.chat(prompts.text())).headers["X-Sluice-Worker"] == "e1"
        report.row("seconds after SIGCONT until the rank is admitted again", "below 30", f"{time.monotonic() - begun:.1f}", again and time.monotonic() - begun < 30)

    def long(self, engine, more):
        """A prompt whose one step takes longer than frozen_core, with all bounds at their defaults."""
        report = self.report
        self.router = Router(self.context.router, self.context.run_dir, "router-long", ["--engine", f"{engine.url},id=large"], more)
        self.router.wait_ready()
        for words in (5, 20, 40, 60, 80, 100):  # the router measures how long prompts take
            self.router.ask("/v1/completions", {**prompts.completions(prompts.text(words)), "max_tokens": 2, "stream": True})
        prompt = prompts.text(LONG_WORDS)
        begun = time.monotonic()
        answer = self.router.ask("/v1/completions", {**prompts.completions(prompt), "max_tokens": 2})
        took = time.monotonic() - begun
        tokens = answer.json()["usage"]["prompt_tokens"] if answer.status == 200 else 0
        report.row("one very long prompt: status", 200, answer.status, answer.status == 200)
        report.row("… its tokens, and the duration of its step in seconds", "at least 3000 and 30", f"{tokens}, {took:.0f}", tokens >= 3000 and took >= 30)
        verdicts = {state: self.metric(f'sluice_engine_frozen_total{{state="{state}"}}') for state in ("process", "core", "host")}
        report.row("… verdicts", "none", verdicts, not any(verdicts.values()))
