"""The context of a request: id, trace, deadline and cancellation."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any, Protocol


class _Cut(Protocol):
    def stop(self) -> None: ...
    def kill(self) -> None: ...


class Context:
    """The id, trace, deadline and cancellation of one request, or of several that end together.

    It belongs to the event loop of its calls: stop() and kill() are called there
    (from another thread: loop.call_soon_threadsafe(context.kill)).
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        traceparent: str | None = None,
        tracestate: str | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """timeout is in seconds from now; deadline in those of time.monotonic()."""
        if timeout is not None and deadline is not None:
            raise ValueError("context: timeout and deadline are both given; want one of them")
        if timeout is not None:
            if not (timeout > 0 and math.isfinite(timeout)):
                raise ValueError(f"context: timeout is {timeout!r}; want seconds above 0")
            deadline = time.monotonic() + timeout
        self.id = id or uuid.uuid4().hex
        self.traceparent = traceparent
        self.tracestate = tracestate
        self.deadline = deadline
        self._stopped = False
        self._killed = False
        self._calls: set[_Cut] = set()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def killed(self) -> bool:
        return self._killed

    def stop(self) -> None:
        """Stops the request: items already sent arrive, then one whose finish reason is "cancelled"."""
        self._stopped = True
        for call in tuple(self._calls):
            call.stop()

    def kill(self) -> None:
        """Ends the request at once: the router cancels the engine calls and the reader gets Killed."""
        self._killed = True
        for call in tuple(self._calls):
            call.kill()

    def remaining(self) -> float | None:
        """Returns the seconds until the deadline, None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def wire(self) -> dict[str, Any]:
        """Returns the request's member "context" as of now."""
        members: dict[str, Any] = {"id": self.id}
        if self.traceparent:
            members["traceparent"] = self.traceparent
        if self.tracestate:
            members["tracestate"] = self.tracestate
        left = self.remaining()
        if left is not None:
            members["timeout_ms"] = min(max(1, math.ceil(left * 1000)), 24 * 3600 * 1000)
        return members
