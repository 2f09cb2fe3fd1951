# SPDX-License-Identifier: Apache-2.0
"""Determines the outcome of each request's KV transfer from what NixlConnector's worker does.

It leans on few things of vLLM's, each of which may be missing in another
release: the report is then poorer, and the engine runs on as it would.

    what                                   since   without it
    get_transfer_results().failed_recving  0.31    failures are seen by _handle_failed_transfer
    _handle_failed_transfer                0.14    failures are reported as ok, as vLLM itself does
    _reap_expired_send_leases              0.31    an expiry is inferred from its deadline in _reqs_to_send
    _pop_done_transfers asks for telemetry 0.14    bytes and time are 0

Releases are those looked at; tests/test_releases.py runs it beside the code of each.
"""

import time

from .log import logger
from .report import EXPIRED, FAILED, OK, RECV, SENT, Report


class Watch:
    """Watches one connector worker. All of it runs on the engine's thread
    and costs it a few dictionary look-ups for each request that ends."""

    def __init__(self, worker, put):
        self._worker = worker
        self._put = put
        self._failed = set()
        self._expired = set()
        self._moved = {}  # request -> [bytes, micros]
        self._slots = {}  # request -> CompletionSlot
        self._telemetry = {}  # id(handle) -> telemetry, during one poll
        self._exact_expiry = False
        self._warned = set()
        for install in (self._watch_failures, self._watch_expiry, self._watch_telemetry):
            try:
                install()
            except Exception as e:
                logger.warning("sluice: this vLLM is not fully known (%s): %s", install.__name__, e)

    def expect(self, slots: dict) -> None:
        """Completion slots of requests that are about to come."""
        self._slots.update(slots)
        while len(self._slots) > 65536:  # requests that never came
            self._slots.pop(next(iter(self._slots)))

    def overdue(self) -> set:
        """Requests whose lease is over, for releases that do not say so later."""
        if self._exact_expiry:
            return set()
        try:
            waiting = getattr(self._worker, "_reqs_to_send", None)
            if not waiting:
                return set()
            now = time.perf_counter()
            return {request for request, deadline in waiting.items() if deadline <= now}
        except Exception as e:
            self._stumbled("leases that are over", e)
            return set()

    def ended(self, sent, received, failed=None, overdue=frozenset()) -> None:
        """What one poll of the worker gave: ids of requests."""
        failures = self._failed if failed is None else self._failed | set(failed)
        for request in received:
            status = FAILED if request in failures else OK
            moved = self._moved.pop(request, (0, 0))
            self._put(Report(RECV, request, status, moved[0], moved[1], self._slots.pop(request, None)))
        for request in sent:
            self._moved.pop(request, None)  # of a push, which prefill makes and decode reports
            expired = request in self._expired or request in overdue
            self._put(Report(EXPIRED if expired else SENT, request))
        self._expired.clear()
        if received or len(self._failed) > 4096:
            self._failed.difference_update(received) if received else self._failed.clear()

    def _watch_failures(self) -> None:
        original = self._worker._handle_failed_transfer

        def handle_failed_transfer(request, *args, **kwargs):
            self._failed.add(request)
            return original(request, *args, **kwargs)

        self._worker._handle_failed_transfer = handle_failed_transfer

    def _watch_expiry(self) -> None:
        original = getattr(self._worker, "_reap_expired_send_leases", None)
        if original is None:
            return

        def reap_expired_send_leases(done_sending):
            before = set(done_sending)
            result = original(done_sending)
            self._expired.update(request for request in done_sending if request not in before)
            return result

        self._worker._reap_expired_send_leases = reap_expired_send_leases
        self._exact_expiry = True

    def _watch_telemetry(self) -> None:
        worker, agent = self._worker, self._worker.nixl_wrapper
        pop, telemetry = worker._pop_done_transfers, agent.get_xfer_telemetry

        def get_xfer_telemetry(handle):
            found = telemetry(handle)
            self._telemetry[id(handle)] = found
            return found

        def pop_done_transfers(transfers):
            if not transfers:
                return pop(transfers)
            before = ()
            self._telemetry.clear()
            try:
                before = [(request, list(handles)) for request, handles in transfers.items()]
            except Exception as e:
                self._stumbled("transfers in flight", e)
            done = pop(transfers)
            if self._telemetry:
                # Entries that pop has removed from transfers are lost if this code raises an exception.
                try:
                    for request, handles in before:
                        for handle in handles:
                            self._count(request, self._telemetry.get(id(handle[0] if isinstance(handle, tuple) else handle)))
                except Exception as e:
                    self._stumbled("a transfer's bytes and time", e)
            return done

        agent.get_xfer_telemetry = get_xfer_telemetry
        worker._pop_done_transfers = pop_done_transfers

    def _stumbled(self, over: str, e: Exception) -> None:
        """A log line, once for each kind: this is the engine's own loop."""
        if over not in self._warned:
            self._warned.add(over)
            logger.warning("sluice: this vLLM is not fully known: %s cannot be read: %r", over, e)

    def _count(self, request, telemetry) -> None:
        if telemetry is None:
            return
        while len(self._moved) >= 65536:  # of requests without further reports
            self._moved.pop(next(iter(self._moved)))
        moved = self._moved.setdefault(request, [0, 0])
        moved[0] += int(telemetry.totalBytes)
        # Both count from the same moment (measured, NIXL 1.5.1), so the time to post is
        # in the time to transfer. Several transfers of a request run side by side.
        moved[1] = max(moved[1], int(telemetry.postDuration), int(telemetry.xferDuration))
