# SPDX-License-Identifier: Apache-2.0
"""Takes reports from the engine's thread and sends them from one of its own.

``put`` is all that the engine's thread ever runs: it appends to a bounded
queue. What the router does, or that it is gone, costs the engine a log line.
"""

import collections
import logging
import threading
import time

from . import channels, endpoint as endpoints, report as reports
from .log import logger
from .settings import Settings

QUEUE = 4096  # reports; the oldest go first, counted
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # seconds between tries to reach the router
ASK_AGAIN = 15.0  # seconds after which an idle reporter looks whether the router was restarted
MAX_AGE = 60.0  # seconds: an older report helps nobody


class Reporter:
    def __init__(self, settings: Settings, origin: reports.Origin):
        self._settings = settings
        self._origin = origin
        self._queue = collections.deque(maxlen=QUEUE)
        self._wake = threading.Event()
        self._closing = False
        self._channel = None
        self._epoch = None
        self._asked = 0.0
        self._pause = FIRST_PAUSE
        self._not_before = 0.0
        self._last_logged = None
        self.sent = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="sluice-reporter", daemon=True)
        self._thread.start()

    def put(self, report: reports.Report) -> None:
        """Never blocks and never raises."""
        if len(self._queue) == QUEUE:
            self.dropped += 1
        self._queue.append((time.monotonic(), report))
        self._wake.set()

    @property
    def channel(self):
        """The name of the channel in use, None without one."""
        c = self._channel
        return c.name if c is not None else None

    def close(self, timeout: float = 1.0) -> None:
        """Ends the thread; what it cannot send within timeout is lost."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                if self._closing and not self._queue:
                    break
                if not self._ready():
                    if self._closing:
                        break
                    self._forget_old()
                    self._wait(max(0.05, self._not_before - time.monotonic()))
                    continue
                if self._queue:
                    self._send_one()
                else:
                    self._wait(min(self._channel.idle(), ASK_AGAIN))
            except Exception as e:  # nothing may end this thread but close
                self._lost(f"unexpected: {e!r}")
        self._drop_channel()

    def _wait(self, seconds: float) -> None:
        if self._closing:
            return
        self._wake.wait(seconds)
        self._wake.clear()

    def _send_one(self) -> None:
        at, report = self._queue.popleft()
        if time.monotonic() - at > MAX_AGE:
            self.dropped += 1
            return
        try:
            record = reports.record(report, self._origin)
            line = reports.encode(report, self._origin) if record is None else None
        except ValueError as e:
            self.dropped += 1
            self._say("report", f"a report was not sent: {e}")
            return
        try:
            if self._channel.send(line) if record is None else self._channel.record(report.slot, record):
                self.sent += 1
                return
            why = "the router takes nothing"
        except channels.Dead as e:
            why = str(e)
        if len(self._queue) < QUEUE:
            self._queue.appendleft((at, report))
        else:
            self.dropped += 1
        self._lost(why)

    def _ready(self) -> bool:
        """Whether there is a channel; makes one when it is time to."""
        now = time.monotonic()
        s = self._settings
        # Queued reports are sent first: a request for the document takes an HTTP call.
        again = 4 * ASK_AGAIN if self._queue else ASK_AGAIN
        if self._channel is not None and (s.zmq or now - self._asked < again):
            return True
        if now < self._not_before:
            return False
        if s.zmq:
            found = endpoints.Endpoint("", s.zmq, None)
        else:
            self._asked = now
            try:
                found = endpoints.fetch(s.router, s.token)
            except (OSError, ValueError) as e:
                if self._channel is not None:
                    return True  # perhaps only its HTTP side is busy
                self._lost(f"no answer from {s.router}: {e}")
                return False
        if self._channel is not None:
            if found.epoch == self._epoch:
                return True
            self._drop_channel()  # the router was restarted
        channel = channels.open_channel(s.channel, found, lambda why: self._say("channel", why))
        if channel is None:
            self._lost("it offers no channel that works here")
            return False
        self._channel, self._epoch, self._pause = channel, found.epoch, FIRST_PAUSE
        self._say("state", f"transfers are reported to the router over {channel.name}", logging.INFO)
        return True

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            try:
                channel.close()
            except Exception as e:  # of a channel that has failed already
                logger.warning("sluice: %s to the router did not close: %r", channel.name, e)

    def _lost(self, why: str) -> None:
        self._drop_channel()
        self._say("state", f"transfers are not reported to the router: {why}")
        self._not_before = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, LAST_PAUSE)

    def _forget_old(self) -> None:
        limit = time.monotonic() - MAX_AGE
        while self._queue and self._queue[0][0] < limit:
            self._queue.popleft()
            self.dropped += 1

    def _say(self, what: str, message: str, level: int = logging.WARNING) -> None:
        """A log line, once for each change."""
        if self._last_logged != (what, message):
            self._last_logged = (what, message)
            logger.log(level, "sluice: %s", message)
