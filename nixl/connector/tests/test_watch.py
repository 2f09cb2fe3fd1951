# SPDX-License-Identifier: Apache-2.0
"""The watch beside a worker that does what vLLM's does in the places it leans on.
The worker here is a fake: a real one needs an engine, which scripts/ runs."""

import time
import unittest

from sluice_connector.report import EXPIRED, FAILED, OK, RECV, SENT, CompletionSlot
from sluice_connector.watch import Watch


class Telemetry:
    totalBytes, postDuration, xferDuration = 4096, 10, 90


class Agent:
    def get_xfer_telemetry(self, handle):
        return Telemetry()


class Worker:
    def __init__(self):
        self.nixl_wrapper = Agent()
        self._reqs_to_send = {}

    def _handle_failed_transfer(self, request, handle):
        return True

    def _pop_done_transfers(self, transfers):
        for handles in transfers.values():
            for handle in handles:
                self.nixl_wrapper.get_xfer_telemetry(handle)
        done = set(transfers)
        transfers.clear()
        return done, set()

    def _reap_expired_send_leases(self, done):
        now = time.perf_counter()
        for request in [r for r, at in self._reqs_to_send.items() if at <= now]:
            del self._reqs_to_send[request]
            done.add(request)


class WatchTest(unittest.TestCase):
    def setUp(self):
        self.worker, self.got = Worker(), []
        self.watch = Watch(self.worker, self.got.append)

    def test_bytes_time_and_slot_of_a_transfer(self):
        slot = CompletionSlot(7, 1, 99, 3)
        self.watch.expect({"r": slot})
        self.worker._pop_done_transfers({"r": [object(), object()]})
        self.watch.ended((), {"r"})
        (report,) = self.got
        self.assertEqual(report, (RECV, "r", OK, 8192, 90, slot))
        self.watch.ended((), {"r"})
        self.assertEqual(self.got[1][3:], (0, 0, None), "nothing is left of the one before")

    def test_failures(self):
        self.worker._handle_failed_transfer("a", None)
        self.watch.ended((), {"a", "b"})
        self.watch.ended((), {"c"}, {"c"})
        self.assertEqual({(t.request, t.status) for t in self.got}, {("a", FAILED), ("b", OK), ("c", FAILED)})

    def test_expiry_is_distinguished(self):
        self.worker._reqs_to_send = {"late": 0.0, "alive": time.perf_counter() + 100}
        done = {"read"}
        self.worker._reap_expired_send_leases(done)
        self.watch.ended(done, ())
        self.assertEqual({(t.event, t.request) for t in self.got}, {(SENT, "read"), (EXPIRED, "late")})

    def test_expiry_in_releases_that_do_not_say(self):
        class Old(Worker):
            _reap_expired_send_leases = None

        worker = Old()
        watch = Watch(worker, self.got.append)
        worker._reqs_to_send = {"late": 0.0}
        watch.ended({"late"}, (), None, watch.overdue())
        self.assertEqual(self.got[0].event, EXPIRED)

    def test_a_worker_that_has_none_of_it(self):
        with self.assertLogs("vllm.sluice_connector", "WARNING"):
            watch = Watch(object(), self.got.append)
        watch.ended({"s"}, {"r"})
        self.assertEqual({(t.event, t.request) for t in self.got}, {(SENT, "s"), (RECV, "r")})

    def test_what_cannot_be_read_stays_ours(self):
        """The engine gets what its own code gave, whatever becomes of the report."""

        class Odd(Worker):
            _reap_expired_send_leases = None

        worker = Odd()
        watch = Watch(worker, self.got.append)
        worker._reqs_to_send = {"r": (1.0, "another form of deadline")}
        with self.assertLogs("vllm.sluice_connector", "WARNING") as reported:
            for _ in range(3):
                self.assertEqual(watch.overdue(), set())
        self.assertEqual(len(reported.output), 1, "once")
        before, Telemetry.totalBytes = Telemetry.totalBytes, "many"
        self.addCleanup(setattr, Telemetry, "totalBytes", before)
        with self.assertLogs("vllm.sluice_connector", "WARNING"):
            self.assertEqual(worker._pop_done_transfers({"r": [object()]}), ({"r"}, set()))

    def test_a_push_leaves_nothing_at_prefill(self):
        for i in range(10):
            self.worker._pop_done_transfers({f"r{i}": [object()]})
            self.watch.ended({f"r{i}"}, ())
        self.assertEqual(self.watch._moved, {})

    def test_nothing_grows(self):
        for i in range(70_000):
            self.watch.expect({f"r{i}": CompletionSlot(1, 1, 1, 1)})
            self.worker._handle_failed_transfer(f"r{i}", None)
            self.worker._pop_done_transfers({f"r{i}": [self]})
            self.watch.ended({"s"}, ())
        self.assertLessEqual(len(self.watch._moved), 65536)
        self.assertLessEqual(len(self.watch._slots), 65536)
        self.assertLessEqual(len(self.watch._failed), 4097)


if __name__ == "__main__":
    unittest.main()
