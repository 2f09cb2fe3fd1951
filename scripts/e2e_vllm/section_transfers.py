"""KV transfers as the router is told of them: our connector in two prefill engines
and one decode engine, over NIXL and over ZMQ, and an engine killed in mid-transfer."""

import contextlib
import datetime
import glob
import http.server
import json
import os
import signal
import threading
import time

import http_calls
import prompts
from engines import Engine, wait_ready
from processes import free_port, say
from router import Router

TOKEN = "e2e-token-0123456789"
CHAT = "/v1/chat/completions"
HERE = os.path.dirname(os.path.abspath(__file__))


def until(condition, patience, pause=0.1):
    end = time.monotonic() + patience
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return value


class Tap:
    """Stands before an engine's HTTP server; on_handle is called with each answer
    that carries a hand-over, before it is passed on."""

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
                    self.close_connection = True  # as the engine itself would
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
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("Transfers told over NIXL")
        self.port = free_port()
        found = glob.glob(os.path.join(context.cache, "venv/lib/python3*/site-packages/.nixl_cu1*.mesonpy.libs"))
        self.library = found[0] if found else ""
        self.engines = {}
        for name, role in (("p1", "kv_producer"), ("p2", "kv_producer"), ("d1", "kv_consumer")):
            self.engines[name] = Engine(context.cache, context.run_dir, name, kv_role=role, connector={
                "router": f"http://127.0.0.1:{self.port}", "worker": name,
            }, env={"SLUICE_TOKEN": TOKEN, "PYTHONPATH": os.path.join(HERE, "../../nixl/connector")})  # fmt: skip
        try:
            wait_ready(list(self.engines.values()))
            self.tap = Tap(self.engines["p1"])
            with self.router("nixl", {"SLUICE_TRANSFERS_LIBRARY": self.library}) as router:
                self.told(router, "nixl", 8)
            report.section("The NIXL library hidden: told over ZMQ")
            with self.router("zmq", {"SLUICE_TRANSFERS_LIBRARY": "/nonexistent"}) as router:
                self.told(router, "zmq", 4)
            report.section("A prefill engine killed in mid-transfer")
            with self.router("kill", {"SLUICE_TRANSFERS_LIBRARY": self.library}) as router:
                self.told(router, "nixl", 2)
                with report.guarded("killed in mid-transfer"):
                    self.killed(router)
        finally:
            for engine in self.engines.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(engine.process.popen.pid, signal.SIGCONT)
                engine.stop()

    @contextlib.contextmanager
    def router(self, name, env):
        flags = ["--register", f"127.0.0.1:{self.port}"]
        flags += ["--prefill", f"{self.tap.url},id=p1"]
        flags += ["--prefill", f"{self.engines['p2'].url},id=p2"]
        flags += ["--decode", f"{self.engines['d1'].url},id=d1,connector=true"]
        env = {"SLUICE_REGISTER_TOKEN": TOKEN, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", **env}
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

        return until(ended, 10) or {"outcome": {}}

    def told(self, router, tier, count):
        """Every hand-over's end is told, with bytes and time, before its first token."""
        report = self.report
        active = until(lambda: self.health(router)["active"] == tier and self.health(router), 60)
        report.row(f"`/health` names the tier {tier}", tier, self.health(router)["active"], bool(active))
        report.note(self.health(router)["reason"][:300].replace(os.path.expanduser("~"), "~"))
        # The connectors look for a router that was restarted every 15 s, and then
        # set up their channel: a request tells when they are there.
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
        seen, late, texts = [], [], []
        for i in range(count):
            request, streamed = f"{router.process.name}-{i}", i % 2 == 1
            body = prompts.chat(prompts.text(40 + 20 * i))
            answer = router.ask(CHAT, {**body, "stream": streamed}, {"X-Request-Id": request})
            texts.append(bool(prompts.said(CHAT, answer, streamed)) and answer.status == 200)
            outcome = self.account(router, request)["outcome"]
            transfer = outcome.get("transfer") or {}
            seen.append((request, answer.headers.get("X-Sluice-Prefill-Worker"), transfer.get("state"), transfer.get("bytes"), transfer.get("took_ms"), transfer.get("after_ms")))
            late.append(transfer.get("after_ms", 1e9) <= outcome["total_ms"])
        report.equal(f"{count} requests are answered", count, sum(texts))
        report.equal("of these, hand-overs told done", count, sum(s[2] == "done" for s in seen))
        report.equal("with bytes and time", count, sum(bool(s[3] and s[4]) for s in seen))
        report.equal("each before its request's end, in the requests' order", count, sum(late))
        for s in seen:
            report.note("%s from %s: %s, %s bytes in %s ms, told %s ms after prefill's answer" % s)
        view = self.admin(router, "/admin/v1/transfers").json()
        report.note("pairs: " + json.dumps(view["pairs"]))
        report.note("reports: " + json.dumps({k: v for k, v in view["reports"].items() if v}))
        report.row("no report was malformed or refused", 0, view["reports"]["malformed"] + view["reports"]["refused"], view["reports"]["malformed"] + view["reports"]["refused"] == 0)

    def health(self, router):
        return http_calls.get(router.url, "/health").json()["kv_tier"]

    def killed(self, router):
        """p1 is frozen when it has answered, so that decode's read hangs, and killed
        a second later."""
        report, p1 = self.report, self.engines["p1"]
        times = {}

        def freeze():
            if "frozen" in times:
                return
            times["frozen"] = time.monotonic()
            os.killpg(p1.process.popen.pid, signal.SIGSTOP)
            for child in children(p1.process.popen.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGSTOP)

            def kill():
                times["killed"], times["wall"] = time.monotonic(), time.time()
                for child in children(p1.process.popen.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                os.killpg(p1.process.popen.pid, signal.SIGKILL)

            threading.Timer(1.0, kill).start()

        self.tap.on_handle = freeze
        for i in range(12):  # until one is prefilled on p1
            request = f"{router.process.name}-lost-{i}"
            body = prompts.chat(prompts.text(300))
            begun = time.monotonic()
            answer = router.ask(CHAT, body, {"X-Request-Id": request})
            ended = time.monotonic()
            if "frozen" in times:
                break
        report.row("a request was prefilled on p1, which was frozen and killed", "yes", "killed" in times, "killed" in times)
        account = self.account(router, request)
        notes = [n["text"] for n in account.get("notes") or []]
        report.equal("its client got an answer", 200, answer.status)
        report.equal("prefilled again on", "p2", answer.headers.get("X-Sluice-Prefill-Worker"))
        alone = http_calls.post(self.engines["d1"].url, CHAT, {**body, "cache_salt": f"alone-{time.time_ns()}"})
        report.equal("with the text of the decode engine alone", prompts.said(CHAT, alone), prompts.said(CHAT, answer))
        lost = [n for n in account.get("notes") or [] if n["text"].startswith(("transfer_", "hand_over", "lost"))]
        began = datetime.datetime.fromisoformat(account["begun"].replace("Z", "+00:00")[:26] + "+00:00").timestamp()
        known = began + lost[0]["at_ms"] / 1000 - times["wall"] if lost else 1e9
        report.row("from the kill to the router's knowing", "below 5 s", f"{known:.2f} s", known < 5)
        report.note(f"from the kill to the whole answer: {ended - times['killed']:.2f} s, prefill on p2 and decode included")
        report.note(f"request begun {times['frozen'] - begun:.2f} s before the freeze; notes of its record: {notes}")
        report.row("the record says why", "a note of it", [n["text"] for n in lost], bool(lost))


def children(pid):
    """All descendants: the engine's core is a process of its own."""
    found = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(stat, encoding="ascii", errors="replace") as f:
            fields = f.read().rsplit(")", 1)[1].split()
            if int(fields[1]) == pid:
                child = int(stat.split("/")[2])
                found += [child, *children(child)]
    return found
