"""Reports of KV transfers to the router: Sluice's connector in a prefill and a decode engine,
over NIXL, UCX and ZMQ, and a prefill engine that freezes or is killed during a transfer."""

import contextlib
import datetime
import glob
import http.server
import json
import os
import re
import signal
import threading
import time

import http_calls
import prompts
import renewal
from engines import Engine, wait_ready
from gate import Gate
from processes import free_port
from release import Abandoned
from router import Router

TOKEN = "e2e-token-0123456789"
LATE = 2  # seconds after a request's end within which the router accepts a report of its transfer
STALL = 3  # transfers.stall_timeout: seconds without a notification of a transfer
CHAT = "/v1/chat/completions"
HERE = os.path.dirname(os.path.abspath(__file__))


def until(condition, timeout, pause=0.1):
    end = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return value


class Tap:
    """An HTTP proxy in front of an engine. It calls on_handle for each answer with a handle,
    before it passes the answer on."""

    def __init__(self, engine):
        tap, self.on_handle = self, None

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                connection = http_calls._connect(engine.url, 300)
                try:
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
                    connection.request(self.command, self.path, body or None, headers)
                    response = connection.getresponse()
                    data = response.read()
                except OSError:
                    self.close_connection = True  # as the engine does
                    return
                finally:
                    connection.close()
                if tap.on_handle and b'"remote_block_ids":[' in data:
                    tap.on_handle()
                self.send_response(response.status)
                self.send_header("Content-Type", response.headers.get("Content-Type", "application/json"))
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            do_GET = do_POST = forward

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Section:
    # Name, role, and whether it runs Sluice's connector; p2 is unmodified vLLM.
    engines_of = (("p1", "kv_producer", True), ("p2", "kv_producer", False), ("d1", "kv_consumer", True))
    kind = "NixlConnector"

    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        self.start()
        try:
            wait_ready(list(self.engines.values()))
            self.check()
        finally:
            for engine in self.engines.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(engine.process.popen.pid, signal.SIGCONT)
                engine.stop()

    def start(self):
        context = self.context
        self.port = free_port()
        found = glob.glob(os.path.join(context.cache, "venv/lib/python3*/site-packages/.nixl_cu1*.mesonpy.libs"))
        self.capi = found[0] if found else ""
        self.engines = {}
        for name, role, connector in self.engines_of:
            ours = {
                "connector": {"router": f"http://127.0.0.1:{self.port}", "worker": name},
                "env": {"SLUICE_TOKEN": TOKEN, "PYTHONPATH": os.path.join(HERE, "../../nixl/connector")},
            }
            self.engines[name] = Engine(context.cache, context.run_dir, name, kv_role=role, kind=self.kind, **(ours if connector else {}))

    def begin(self):
        self.tap = Tap(self.engines["p1"])
        self.front = Gate(self.tap.url)  # p1's address as the router knows it

    def tiers(self, *names):
        """Returns each tier's name and the environment in which the router chooses it."""
        nixl = {"SLUICE_TRANSFERS_NIXL_LIBRARY": self.capi}
        best = {
            "nixl": nixl,
            "ucx": {**nixl, "SLUICE_TRANSFERS_NIXL": "off"},
            "zmq": {"SLUICE_TRANSFERS_NIXL_LIBRARY": "/nonexistent", "SLUICE_TRANSFERS_UCX": "off"},
        }
        return [(name, best[name]) for name in names]

    def check(self):
        report = self.report
        self.begin()
        titles = {"nixl": "Transfers reported over NIXL", "ucx": "NIXL off in the router: reported over UCX", "zmq": "The NIXL library hidden: reported over ZMQ"}
        for tier, env in self.tiers("nixl", "ucx", "zmq"):
            report.section(titles[tier])
            if tier == "nixl":
                nixl = env
                report.note("p1 and d1 run Sluice's connector; p2 is unmodified vLLM")
            with self.router(tier, env) as router:
                self.reported(router, tier, 8 if tier == "nixl" else 4)
        report.section("Unmodified vLLM: blocks of abandoned requests")
        with report.guarded("abandoned requests"):
            self.abandoned()
        report.section("Unmodified vLLM: a request that waits between the legs for longer than the lease")
        with report.guarded("a lease that is renewed"):
            self.renewed()
        report.section("A prefill engine frozen during a transfer: the transfer stalls")
        with self.router("stall", {**nixl, "SLUICE_TRANSFERS_STALL_TIMEOUT": f"{STALL}s"}) as router:
            self.found(router, "nixl")
            with report.guarded("frozen during a transfer"):
                self.stalled(router)
        report.section("A prefill engine killed during a transfer")
        with self.router("kill", nixl) as router:
            self.reported(router, "nixl", 2)
            with report.guarded("killed during a transfer"):
                self.killed(router)

    def abandoned(self):
        """p2 is the only prefill engine; it runs vLLM's own connector."""
        tap, gate = Tap(self.engines["p2"]), Gate(self.engines["d1"].url)
        checks = Abandoned(self.report, self.engines["p2"], tap, gate, self.alone)
        flags = ["--prefill", f"{tap.url},id=p2", "--decode", f"{gate.url},id=d1"]
        for mode, check in (("release", checks.released), ("off", checks.kept)):
            env = {
                "SLUICE_TRANSFERS_NIXL_LIBRARY": self.capi, "SLUICE_TRANSFERS_SIDE_CHANNEL": mode,
                "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "SLUICE_HEALTH_INTERVAL": "500ms",
            }  # fmt: skip
            router = Router(self.context.router, self.context.run_dir, "router-side-channel-" + mode, flags, env)
            try:
                router.wait_ready()
                if mode == "release":
                    self.report.note("router: `sluice serve --prefill URL --decode URL`, transfers.side_channel: release; the prefill engine runs vLLM's NixlConnector")
                    until(lambda: self.health(router)["active"] == "nixl", 60)
                check(router)
            finally:
                router.process.stop(5)

    def renewed(self):
        """p2 is the only prefill engine, as in abandoned."""
        gate, p2, d1 = Gate(self.engines["d1"].url), self.engines["p2"], self.engines["d1"]
        flags = ["--prefill", f"{p2.url},id=p2", "--decode", f"{gate.url},id=dead,kv_events=off", "--decode", f"{d1.url},id=d1"]
        env = {
            "SLUICE_TRANSFERS_NIXL_LIBRARY": self.capi, "SLUICE_TRANSFERS_SIDE_CHANNEL": "renew",
            "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", **renewal.environment(),
        }  # fmt: skip
        router = Router(self.context.router, self.context.run_dir, "router-renew", flags, env)
        try:
            router.wait_ready()
            self.report.note(f"router: `sluice serve --prefill URL {renewal.FLAGS[1:]}, transfers.side_channel: renew, timeouts.connect {renewal.CONNECT} s; the gate leaves connection attempts unanswered")
            until(lambda: self.health(router)["active"] == "nixl", 60)
            until(lambda: http_calls.get(router.url, "/metrics").text().count('state="ready"} 1') == 3, 60)
            renewal.check(self.report, router, p2, d1, gate, self.alone)
        finally:
            router.process.stop(5)
            gate.close()

    def alone(self, path, body):
        """Returns the text of the decode engine without the router and without a cached prefix."""
        return prompts.generated(path, http_calls.post(self.engines["d1"].url, path, {**body, "cache_salt": f"alone-{time.time_ns()}"}))

    @contextlib.contextmanager
    def router(self, name, env):
        flags = ["--register", f"127.0.0.1:{self.port}"]
        flags += ["--prefill", f"{self.front.url},id=p1"]
        flags += ["--prefill", f"{self.engines['p2'].url},id=p2"]
        flags += ["--decode", f"{self.engines['d1'].url},id=d1,connector=true"]
        env = {"SLUICE_REGISTRATION_TOKEN": TOKEN, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", **env}
        router = Router(self.context.router, self.context.run_dir, "router-" + name, flags, env)
        try:
            router.wait_ready()
            yield router
        finally:
            router.process.stop(5)

    def admin(self, router, path):
        with open(router.runtime_file, encoding="utf-8") as f:
            runtime = json.load(f)
        base = runtime["address"] if runtime["address"].startswith("http") else "http://" + runtime["address"]
        return http_calls.get(base, path, {"Authorization": "Bearer " + runtime["token"]})

    def account(self, router, request):
        def ended():
            answer = self.admin(router, "/admin/v1/explain/" + request)
            return answer.status == 200 and answer.json().get("outcome") and answer.json()

        def with_report():
            account = ended()
            return account and (account["outcome"].get("transfer") or {}).get("state") != "unknown" and account

        # The router still records the report of a slow engine after the request's end.
        return until(with_report, LATE + 1) or until(ended, 10) or {"outcome": {}}

    def found(self, router, tier):
        """Checks that the tier is active and that the connectors have found the router."""
        report = self.report
        active = until(lambda: self.health(router)["active"] == tier and self.health(router), 60)
        report.row(f"`/admin/v1/health` names the tier {tier}", tier, self.health(router)["active"], bool(active))
        report.note(self.health(router)["reason"][:300].replace(os.path.expanduser("~"), "~"))
        # The connectors look for a restarted router every 15 s and then set up their channel.
        # A request with a reported transfer shows that they are ready.
        warm = 0

        def heard():
            nonlocal warm
            warm += 1
            request = f"{router.process.name}-warm-{warm}"
            router.ask(CHAT, prompts.chat(prompts.text()), {"X-Request-Id": request})
            return (self.account(router, request)["outcome"].get("transfer") or {}).get("state") == "done"

        begun = time.monotonic()
        found = until(heard, 60, 1)
        took = time.monotonic() - begun
        report.row("the connectors have found the router", "within 60 s", f"{took:.0f} s, {warm} requests" if found else "no", found)

    def reported(self, router, tier, count):
        """Checks that the end of every hand-over is reported, with bytes and duration."""
        report = self.report
        self.found(router, tier)
        seen, late, texts = [], [], []
        for i in range(count):
            request, streamed = f"{router.process.name}-{i}", i % 2 == 1
            body = prompts.chat(prompts.text(40 + 20 * i))
            answer = router.ask(CHAT, {**body, "stream": streamed}, {"X-Request-Id": request})
            texts.append(bool(prompts.generated(CHAT, answer, streamed)) and answer.status == 200)
            outcome = self.account(router, request)["outcome"]
            transfer = outcome.get("transfer") or {}
            seen.append((request, answer.headers.get("X-Sluice-Prefill-Worker"), transfer.get("state"), transfer.get("bytes"), transfer.get("took_ms"), transfer.get("after_ms")))
            late.append(transfer.get("after_ms", 1e9) <= outcome["total_ms"] + LATE * 1000)
        report.equal(f"{count} requests are answered", count, sum(texts))
        report.equal("of these, hand-overs reported done", count, sum(s[2] == "done" for s in seen))
        report.equal("with bytes and duration", count, sum(bool(s[3] and s[4]) for s in seen))
        report.equal(f"each before its request's end or within {LATE} s of it, in the requests' order", count, sum(late))
        for s in seen:
            report.note("%s from %s: %s, %s bytes in %s ms, reported %s ms after prefill's answer" % s)
        view = self.admin(router, "/admin/v1/transfers").json()
        report.note("pairs: " + json.dumps(view["pairs"]))
        report.note("reports: " + json.dumps({k: v for k, v in view["reports"].items() if v}))
        report.row("no report was malformed or refused", 0, view["reports"]["malformed"] + view["reports"]["refused"], view["reports"]["malformed"] + view["reports"]["refused"] == 0)

    def health(self, router):
        return self.admin(router, "/admin/v1/health").json()["kv_tier"]

    def lost(self, router, then=None):
        """Sends a request whose prefill engine, p1, is frozen once it has answered, so that decode's
        read hangs; `then` runs in a thread of its own. Returns the times of the events."""
        report, p1, times = self.report, self.engines["p1"], {}

        def freeze():
            if "frozen" in times:
                return
            times["frozen"], times["wall"] = time.monotonic(), time.time()
            for pid in [p1.process.popen.pid, *children(p1.process.popen.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if then:
                threading.Thread(target=then, args=(times,), daemon=True).start()

        self.tap.on_handle = freeze
        for i in range(12):  # until p1 runs the prefill of one
            request = f"{router.process.name}-lost-{i}"
            body = prompts.chat(prompts.text(300))
            answer = router.ask(CHAT, body, {"X-Request-Id": request})
            times["answered"] = time.monotonic()
            if "frozen" in times:
                break
        self.tap.on_handle = None
        report.row("p1 ran the prefill of a request and was frozen after it", "yes", "frozen" in times, "frozen" in times)
        account = self.account(router, request)
        report.equal("its client got an answer", 200, answer.status)
        report.equal("prefill ran again on", "p2", answer.headers.get("X-Sluice-Prefill-Worker"))
        report.equal("with the text of the decode engine alone", self.alone(CHAT, body), prompts.generated(CHAT, answer))
        lost = [n for n in account.get("notes") or [] if n["text"].startswith("transfer_")]
        report.row("the record has the reason", "a transfer_ note", [n["text"] for n in lost], bool(lost))
        if lost:
            began = datetime.datetime.fromisoformat(account["started"].replace("Z", "+00:00")[:26] + "+00:00").timestamp()
            # The text ends with "after 3.017s", measured from prefill's answer.
            times["waited"] = seconds(lost[0]["text"].rsplit(" ", 1)[1])
            times["known"] = times["frozen"] + began + lost[0]["at_ms"] / 1000 - times["wall"]
        return times

    def stalled(self, router):
        """p1 continues later: it was only stopped for a while."""
        report, p1 = self.report, self.engines["p1"]
        try:
            times = self.lost(router)
        finally:
            for pid in [p1.process.popen.pid, *children(p1.process.popen.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        answered = times["answered"] - times["frozen"]
        waited = times.get("waited", 1e9)
        report.row(f"from prefill's answer until the router abandoned it, with a stall_timeout of {STALL} s", f"{STALL} to {STALL + 0.5} s", f"{waited:.2f} s", STALL <= waited < STALL + 0.5)
        report.note(f"from the freeze to the complete answer through p2: {answered:.2f} s; p1 was frozen during this time")
        back = until(lambda: p1.alive() and not p1.metrics().usage_blocks(), 60, 0.2)
        report.row("p1 continues, and none of its blocks stays in use", "yes", back, back)

    def killed(self, router):
        """Kills p1 one second after the freeze. Its address refuses connections once its API server
        has ended. The log of the decode engine shows when NIXL noticed."""
        report, p1, log = self.report, self.engines["p1"], self.engines["d1"].process.log

        def kill(times):
            time.sleep(1)
            pids = [*children(p1.process.popen.pid), p1.process.popen.pid]
            size = os.path.getsize(log)
            times["killed"] = time.monotonic()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with open(log, encoding="utf-8", errors="replace") as logged:
                logged.seek(size)
                # The kernel frees the memory of a killed process before it closes its connections,
                # which takes long for gigabytes.
                marks = {
                    "api": lambda: not lives(p1.process.popen.pid),
                    "gone": lambda: not any(map(lives, pids)),
                    "logged": lambda: "REMOTE_DISCONNECT" in logged.read(),
                }
                end = time.monotonic() + 60
                while marks and time.monotonic() < end:
                    for mark in [m for m, reached in marks.items() if reached()]:
                        times[mark] = time.monotonic()
                        del marks[mark]
                        if mark == "api":
                            self.front.shut()
                    time.sleep(0.002)

        times = self.lost(router, kill)
        until(lambda: "gone" in times and "logged" in times, 30)
        after = {k: times.get(k, 1e9) - times["killed"] for k in ("api", "gone", "logged", "known", "answered")}
        report.note(
            "times after the kill: the API server had ended after {api:.2f} s, the whole engine after {gone:.2f} s; decode's NIXL reported the loss of its peer "
            "after {logged:.2f} s; the router noticed after {known:.2f} s; the client had its complete answer, through p2, after {answered:.2f} s".format(**after)
        )
        late = after["known"] - min(after["gone"], after["logged"])
        report.row("the router notices, after the engine's processes have ended or decode's NIXL has reported it", "within 0.5 s", "before" if late < 0 else f"{late * 1000:.0f} ms", late < 0.5)


def seconds(duration):
    """Parses a duration below an hour in Go's format."""
    total, factors = 0.0, {"m": 60, "s": 1, "ms": 1e-3, "µs": 1e-6}
    for number, unit in re.findall(r"([0-9.]+)(ms|µs|m|s)", duration):
        total += float(number) * factors[unit]
    return total


def lives(pid):
    """Reports whether the process runs; a zombie does not."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
        return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def children(pid):
    """Returns the ids of all descendants, such as the engine's core."""
    found = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(stat, encoding="ascii", errors="replace") as f:
            fields = f.read().rsplit(")", 1)[1].split()
            if int(fields[1]) == pid:
                child = int(stat.split("/")[2])
                found += [child, *children(child)]
    return found
