# SPDX-License-Identifier: Apache-2.0
"""The reporter over real sockets: a PULL socket and a small HTTP server stand for
the router; over NIXL, where it is installed, a real agent does."""

import base64
import ctypes
import http.server
import json
import os
import random
import socketserver
import threading
import time
import unittest
import uuid

import zmq

from sluice_connector.report import FAILED, RECV, SENT, CompletionSlot, Origin, Report, record
from sluice_connector.reporter import QUEUE, Reporter
from sluice_connector.settings import Settings

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:
    if os.environ.get("SLUICE_REQUIRE_NIXL") == "1":
        raise  # asked for: scripts/connector-test.sh --setup installs it
    nixl_agent = None

ORIGIN = Origin("d0")


class Router:
    """Answers /v1/connector with what is in .doc."""

    def __init__(self, doc, token=None):
        self.doc, self.token, self.asked = doc, token, 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked += 1
                if outer.token and self.headers.get("Authorization") != "Bearer " + outer.token:
                    self.send_error(401)
                    return
                body = json.dumps(outer.doc).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Pull:
    def __init__(self, port=0):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rsplit(":", 1)[1])

    @classmethod
    def to_come_back(cls):
        """On a port that the system gives to nobody while it is not bound."""
        for _ in range(200):
            try:
                return cls(random.randrange(20_000, 32_000))
            except zmq.ZMQError:
                pass
        raise AssertionError("no free port in 200 tries")

    def get(self, seconds=30):
        if not self.socket.poll(seconds * 1000):
            raise AssertionError("nothing came")
        return self.socket.recv()

    def close(self):
        self.socket.close()
        self.context.term()


class ReporterTest(unittest.TestCase):
    def start(self, settings):
        reporter = Reporter(settings, ORIGIN)
        self.addCleanup(reporter.close)
        return reporter

    def test_over_zmq_in_order(self):
        pull = Pull()
        self.addCleanup(pull.close)
        reporter = self.start(Settings(zmq=pull.endpoint))
        for i in range(500):
            reporter.put(Report(RECV, f"r{i}"))
        for i in range(500):
            self.assertTrue(pull.get().endswith(b" r%d" % i))
        self.assertEqual(reporter.channel, "zmq")

    def test_the_router_tells_where(self):
        pull = Pull()
        self.addCleanup(pull.close)
        router = Router({"version": 1, "epoch": "1", "zmq": {"endpoint": pull.endpoint}}, token="t")
        self.addCleanup(router.close)
        reporter = self.start(Settings(router=router.url, token="t"))
        reporter.put(Report(SENT, "r"))
        self.assertEqual(pull.get(), b"SLUICE1 sent ok - - 0 0 0/0/1 d0 r")

    def test_put_costs_nothing_while_the_router_is_away(self):
        reporter = self.start(Settings(router="http://127.0.0.1:9"))
        n = 20_000
        began = time.perf_counter()
        for i in range(n):
            reporter.put(Report(RECV, "r"))
        each = (time.perf_counter() - began) / n
        self.assertLess(each, 100e-6, "put must not wait")
        self.assertGreaterEqual(reporter.dropped, n - QUEUE - 1)
        self.assertIsNone(reporter.channel)

    def test_a_router_that_comes_back(self):
        first = Pull.to_come_back()
        reporter = self.start(Settings(zmq=first.endpoint))
        reporter.put(Report(RECV, "a"))
        self.assertTrue(first.get().endswith(b" a"))
        port = first.port
        first.close()
        time.sleep(0.2)
        reporter.put(Report(RECV, "b"))  # waits here, not lost
        again = Pull(port)
        self.addCleanup(again.close)
        self.assertTrue(again.get(20).endswith(b" b"))

    def test_a_stranger_at_the_routers_port_costs_no_channel(self):
        class Stranger(socketserver.BaseRequestHandler):
            def handle(self):
                self.request.recv(4096)
                self.request.sendall(b"220 mail.example ESMTP\r\n")

        stranger = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stranger)
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        self.addCleanup(stranger.server_close)
        self.addCleanup(stranger.shutdown)
        pull = Pull()
        self.addCleanup(pull.close)
        router = Router({"version": 1, "epoch": "1", "zmq": {"endpoint": pull.endpoint}})
        self.addCleanup(router.close)
        reporter = self.start(Settings(router=router.url))
        reporter.put(Report(SENT, "a"))
        self.assertTrue(pull.get().endswith(b" a"))
        # The next request for the document reaches another server.
        channel = reporter._channel
        reporter._settings = Settings(router=f"http://127.0.0.1:{stranger.server_address[1]}")
        reporter._asked = -1e9
        reporter.put(Report(SENT, "b"))
        self.assertTrue(pull.get().endswith(b" b"))
        deadline = time.monotonic() + 20
        while reporter._asked < 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        reporter.put(Report(SENT, "c"))
        self.assertTrue(pull.get().endswith(b" c"))
        self.assertIs(reporter._channel, channel)

    def test_a_channel_that_does_not_close(self):
        class Stuck:
            name = "stuck"

            def send(self, line):
                raise OSError("not sent")

            def idle(self):
                return 60.0

            def close(self):
                raise OSError("not closed")

        pull = Pull()
        self.addCleanup(pull.close)
        reporter = self.start(Settings(zmq=pull.endpoint))
        reporter.put(Report(SENT, "a"))
        pull.get()
        real, reporter._channel = reporter._channel, Stuck()
        self.addCleanup(real.close)
        reporter.put(Report(SENT, "b"))
        reporter.put(Report(SENT, "c"))
        self.assertTrue(pull.get(20).endswith(b" c"))
        self.assertTrue(reporter._thread.is_alive())

    def test_close_ends_the_thread(self):
        for settings in (Settings(router="http://127.0.0.1:9"), Settings(zmq="tcp://127.0.0.1:9")):
            reporter = Reporter(settings, ORIGIN)
            reporter.put(Report(RECV, "r"))
            reporter.close(5)
            self.assertFalse(reporter._thread.is_alive())

    def test_bad_reports_do_not_stop_the_rest(self):
        pull = Pull()
        self.addCleanup(pull.close)
        reporter = self.start(Settings(zmq=pull.endpoint))
        reporter.put(Report(RECV, "white space"))
        reporter.put(Report(RECV, "good"))
        self.assertTrue(pull.get().endswith(b" good"))
        self.assertEqual(reporter.dropped, 1)

    @unittest.skipIf(nixl_agent is None, "NIXL is not installed here")
    def test_over_nixl(self):
        agent = nixl_agent("router-" + uuid.uuid4().hex, nixl_agent_config(enable_prog_thread=False))
        router = Router({"version": 1, "epoch": "1", "zmq": None, "nixl": {
            "agent": agent.name, "metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "version": "1.5.1"}})
        self.addCleanup(router.close)
        reporter = self.start(Settings(router=router.url))
        for i in range(50):
            reporter.put(Report(RECV, f"r{i}"))
        got, deadline = [], time.monotonic() + 20
        while len(got) < 50 and time.monotonic() < deadline:
            for lines in agent.get_new_notifs().values():
                got += lines
            time.sleep(0.001)
        self.assertEqual([line.rsplit(b" ", 1)[1] for line in got], [b"r%d" % i for i in range(50)])
        self.assertEqual(reporter.channel, "nixl")

    @unittest.skipIf(nixl_agent is None, "NIXL is not installed here")
    def test_records_are_written_into_the_board(self):
        agent = nixl_agent("router-" + uuid.uuid4().hex, nixl_agent_config(enable_prog_thread=True))
        board = (ctypes.c_char * (64 * 64))()
        address = ctypes.addressof(board)
        registered = agent.register_memory([(address, len(board), 0, "")], "DRAM")
        router = Router({"version": 1, "epoch": "1", "nixl": {
            "agent": agent.name, "metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "version": "1.5.1",
            "board": {"address": address, "slots": 64, "slot_bytes": 64, "device": 0}}})
        self.addCleanup(router.close)
        reporter = self.start(Settings(router=router.url))
        reports = [Report(RECV, "r", FAILED, 4096, 250, CompletionSlot(slot, slot + 1, 99, slot)) for slot in range(64)]
        for report in reports:
            reporter.put(report)
        want = b"".join(record(report, ORIGIN) for report in reports)
        deadline = time.monotonic() + 20
        while board.raw != want and time.monotonic() < deadline:
            time.sleep(0.001)
        self.assertEqual(board.raw, want)
        agent.deregister_memory(registered)


if __name__ == "__main__":
    unittest.main()
