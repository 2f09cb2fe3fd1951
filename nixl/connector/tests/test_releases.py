# SPDX-License-Identifier: Apache-2.0
"""The watch beside the worker code of vLLM's releases.

What runs is each release's own text of the methods that the watch leans on, cut out
of the release's wheel (scripts/fixtures/vllm_nixl.py) and put on an object whose
every other part is a mock: vLLM itself needs torch, and one release at a time."""

import __future__

import ast
import collections
import logging
import os
import pathlib
import sys
import time
import typing
import unittest
import unittest.mock

from sluice_connector.log import logger
from sluice_connector.report import EXPIRED, FAILED, OK, RECV, SENT
from sluice_connector.watch import Watch

FOLDER = pathlib.Path(sys.prefix) / "vllm"
METHODS = ("_pop_done_transfers", "_handle_failed_transfer", "_reap_expired_send_leases", "_try_release_xfer_handle", "_log_failure")
# The releases' own names for what is there; the table in watch.py.
FAILURES, EXPIRY, TELEMETRY, RESULTS = "0.14.1", "0.31.0", "0.14.1", "0.31.0"


def order(release):
    return tuple(map(int, release.split(".")))


class Rest:
    """Stands for all of a worker but the methods cut out."""

    def __getattr__(self, name):
        if name in METHODS or name.startswith("__"):
            raise AttributeError(name)
        part = unittest.mock.MagicMock(name=name)
        setattr(self, name, part)
        return part


def worker_of(release):
    """A class with the release's methods, and all names of its connector's classes."""
    methods, names = {}, set()
    for path in sorted((FOLDER / release).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for f in node.body:
                    if isinstance(f, ast.FunctionDef):
                        names.add(f.name)
                        if f.name in METHODS and "Push" not in node.name:
                            methods.setdefault(f.name, f)
    space = {"time": time, "logger": logging.getLogger("vllm"), "defaultdict": collections.defaultdict, "Any": typing.Any}
    flags = __future__.annotations.compiler_flag
    for f in methods.values():
        exec(compile(ast.Module(body=[f], type_ignores=[]), f"vllm-{release}", "exec", flags, dont_inherit=True), space)
    return type("Worker", (Rest,), {name: space[name] for name in methods}), names


@unittest.skipUnless(FOLDER.is_dir() or os.environ.get("SLUICE_REQUIRE_NIXL") == "1", "no vLLM releases here: scripts/connector-test.sh --setup fetches them")
class ReleasesTest(unittest.TestCase):
    def each(self):
        releases = sorted((p.name for p in FOLDER.iterdir()), key=order)
        self.assertGreaterEqual(len(releases), 5)
        for release in releases:
            with self.subTest(release), self.logs():
                cls, names = worker_of(release)
                worker = cls()
                worker.nixl_wrapper.get_xfer_telemetry = lambda handle: unittest.mock.Mock(totalBytes=4096, postDuration=10, xferDuration=90, descCount=2)
                worker._reqs_to_send = {}
                worker._reqs_to_process = set()
                worker._recving_metadata = collections.defaultdict(unittest.mock.MagicMock)
                got = []
                yield order(release), worker, names, Watch(worker, got.append), got

    def logs(self):
        log = logging.getLogger("vllm")
        log.propagate = False
        log.addHandler(logging.NullHandler())
        return unittest.mock.patch.object(logger, "disabled", True)

    def pop(self, release, worker, state):
        worker.nixl_wrapper.check_xfer_state = lambda handle: state
        # Before 0.12 a handle had the time beside it.
        handles = [(7, time.perf_counter())] if release < order("0.12.0") else [7]
        return worker._pop_done_transfers({"r": handles})

    def test_what_a_transfer_moved(self):
        for release, worker, _, watch, got in self.each():
            self.pop(release, worker, "DONE")
            watch.ended((), {"r"})
            moved = (4096, 90) if release >= order(TELEMETRY) else (0, 0)
            self.assertEqual([(g.event, g.request, g.status, g.bytes, g.micros) for g in got], [(RECV, "r", OK, *moved)])

    def test_a_transfer_that_failed(self):
        for release, worker, _, watch, got in self.each():
            if release < order(FAILURES):
                self.assertFalse(hasattr(worker, "_handle_failed_transfer"))
                continue
            self.pop(release, worker, "ERR")
            watch.ended((), {"r"})
            self.assertEqual([(g.event, g.status) for g in got], [(RECV, FAILED)])

    def test_a_lease_that_ended(self):
        for release, worker, names, watch, got in self.each():
            self.assertEqual(release >= order(EXPIRY), "_reap_expired_send_leases" in names)
            worker._reqs_to_send = {"late": 0.0, "alive": time.perf_counter() + 100}
            worker._reqs_to_process = {"late", "alive"}
            overdue, done = watch.overdue(), {"read"}
            if release >= order(EXPIRY):
                worker._reap_expired_send_leases(done)
            else:
                done.add("late")  # as get_finished does, whose rest needs an engine
            watch.ended(done, (), None, overdue)
            self.assertEqual({(g.event, g.request) for g in got}, {(SENT, "read"), (EXPIRED, "late")})

    def test_what_the_connector_calls_is_there(self):
        for release, _, names, _, _ in self.each():
            wanted = {"get_finished", "start_load_kv", "update_state_after_alloc", "build_connector_meta", "shutdown"}
            self.assertEqual(wanted - names, set())
            self.assertEqual("get_transfer_results" in names, release >= order(RESULTS))


if __name__ == "__main__":
    unittest.main()
