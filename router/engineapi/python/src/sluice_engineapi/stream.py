"""One request on a connection: the items received, and the credit for them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Callable

from .errors import DeadlineExceeded, Killed, ProtocolError, EngineAPIError, again
from .frames import Kind

if TYPE_CHECKING:
    from .connection import Connection

# Seconds after the deadline within which the router itself may report it.
_GRACE = 2.0


class Stream:
    """A queue of items, bounded by the window announced to the router. One task reads it."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._room = window  # bytes that the router may still send
        self._owed = 0  # bytes read and not yet granted again as credit
        self._items: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._conn: Connection | None = None
        self._id = 0
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        self.stopped = False
        self.error: EngineAPIError | None = None

    def limit(self, left: float) -> None:
        """Ends the stream a while after its deadline if the router has not."""
        self._timer = asyncio.get_running_loop().call_later(
            left + _GRACE, self.cut, DeadlineExceeded("the deadline is over, and the router did not say so")
        )

    # Called by the connection.

    def opened(self, conn: Connection, number: int) -> None:
        self._conn, self._id = conn, number

    def put(self, payload: bytes) -> None:
        if self._room <= 0:
            raise ProtocolError(f"an item on stream {self._id}, which has no credit left", "protocol")
        self._room -= len(payload)
        self._items.append(payload)
        self.wake()

    def finish(self, error: EngineAPIError | None) -> None:
        """Records the end of the stream; items received before can still be read."""
        if self.ended:
            return
        self.ended, self.error, self._conn = True, error, None
        if self._timer is not None:
            self._timer.cancel()
        self.wake()

    # Called by the caller.

    @property
    def sent(self) -> bool:
        return self._id != 0

    async def until(self, done: Callable[[], bool]) -> None:
        """Waits, before the request is sent, for done or for the request's own end.

        The caller that sets done calls wake.
        """
        while not (done() or self.ended or self.stopped):
            await self._woken()

    async def _woken(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two tasks read one answer; want one")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def take(self) -> bytes | None:
        """Returns the next item's payload; None at a normal end. Raises the error that ended it otherwise."""
        while not self._items:
            if self.ended:
                if self.error is not None:
                    raise again(self.error)
                return None
            await self._woken()
        payload = self._items.popleft()
        self._owed += len(payload)
        if self._owed * 2 >= self._window and self._conn is not None:
            owed, self._owed = self._owed, 0
            self._room += owed
            self._conn.give_credit(self._id, owed)
        return payload

    def stop(self) -> None:
        self.stopped = True
        self.wake()
        if self._conn is not None:
            self._conn.send(Kind.STOP, self._id)

    def kill(self) -> None:
        self.cut(Killed("the caller killed the request", "killed"))

    def cut(self, error: EngineAPIError) -> None:
        """Kills the request and discards the items received."""
        if self.ended:
            return
        conn = self._conn
        self._items.clear()
        self.finish(error)
        if conn is not None:
            conn.send(Kind.KILL, self._id)
            conn.forget(self._id)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
