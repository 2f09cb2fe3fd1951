"""EngineClient uses a router as one engine."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Mapping

from .connection import Connection, Settings
from .context import Context
from .errors import CannotConnect, ConnectionLost, DeadlineExceeded, Killed, ProtocolError, EngineAPIError, again
from .frames import MAX_WINDOW
from .item import Item, Output, decode
from .request import Request, encode
from .stream import Stream

_CLOSED = "the engine was closed by its owner"
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between attempts to connect


class EngineClient:
    """One connection to a router, made when it is first needed and again when it is lost.

    It belongs to one event loop. A request that was in progress on a lost connection
    fails with ConnectionLost; the next one connects again.

        async with EngineClient("unix:///run/sluice/engine.sock") as engine:
            async for item in engine.generate(Request(token_ids=[1, 2, 3], model="m")):
                ...
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        key: str | None = None,
        tls: ssl.SSLContext | bool | None = None,
        server_hostname: str | None = None,
        window: int = 256 << 10,
        agent: str = "python",
        connect_timeout: float = 10.0,
        write_timeout: float = 30.0,
    ) -> None:
        """address is unix:///PATH or tcp://HOST:PORT. token is the socket's, key an API key
        of the router's, where it asks for them; requests count against the key's limits. tls is a context, or True for the
        system's authorities. window is what each request may have unread, in bytes.
        connect_timeout bounds all attempts together for one need of a connection.
        """
        if not 0 < window <= MAX_WINDOW:
            raise ValueError(f"window is {window!r}; want 1 to {MAX_WINDOW} bytes")
        if tls is True:
            tls = ssl.create_default_context()
        self._settings = Settings(
            address, token, key, tls or None, server_hostname, window, agent[:128], connect_timeout, write_timeout
        )
        if self._settings.dialed()[0] == "unix" and tls:
            raise ValueError("tls is for tcp addresses; want none on a unix socket")
        self._conn: Connection | None = None
        self._leaving: set[Connection] = set()  # take no new requests; earlier ones continue
        self._dialing: asyncio.Task[Connection] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"EngineClient({self._settings.address!r})"

    async def __aenter__(self) -> EngineClient:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connects now instead of with the first request. Raises CannotConnect."""
        self._dial_unless_open()
        if self._dialing is not None:
            await asyncio.shield(self._dialing)

    async def close(self) -> None:
        """Closes the connection; requests in progress are killed and raise ConnectionLost."""
        self._closed = True
        if self._dialing is not None:
            self._dialing.cancel()
            await asyncio.gather(self._dialing, return_exceptions=True)
        all = {*self._leaving, *([self._conn] if self._conn else [])}
        for conn in all:
            conn.close()
        if all:
            _, late = await asyncio.wait([conn.lost for conn in all], timeout=1.0)
            if late:
                for conn in all:
                    conn.abort()
                await asyncio.wait(late, timeout=1.0)

    def generate(self, request: Request | Mapping[str, Any], context: Context | None = None) -> Answer:
        """Returns the answer's items, to be read with `async for`.

        Nothing is sent before the first item is asked for. A mapping is sent as it
        stands, with what context says over its member "context".
        """
        return Answer(self, request, context)

    async def _connection(self, stream: Stream) -> Connection | None:
        """Returns the connection, and dials if there is none; None if stream ends first."""
        self._dial_unless_open()
        if (task := self._dialing) is None:
            return self._conn
        waking = lambda _: stream.wake()  # noqa: E731
        task.add_done_callback(waking)
        try:
            await stream.until(task.done)
        finally:
            task.remove_done_callback(waking)
        if not task.done():
            return None
        if task.cancelled():
            raise ConnectionLost(_CLOSED)
        if isinstance(why := task.exception(), EngineAPIError):
            raise again(why)
        return task.result()

    def _dial_unless_open(self) -> None:
        if self._closed:
            raise ConnectionLost(_CLOSED)
        if self._dialing is None and not (self._conn is not None and self._conn.open):
            self._dialing = asyncio.create_task(self._dial(), name="sluice-engineapi dial")
            self._dialing.add_done_callback(self._dialed)

    def _dialed(self, task: asyncio.Task[Connection]) -> None:
        self._dialing = None
        if not task.cancelled():
            task.exception()  # retrieves the exception, because the waiting tasks may have ended

    async def _dial(self) -> Connection:
        """Connects, with retries while nothing listens, because the router may be starting."""
        s = self._settings
        loop = asyncio.get_running_loop()
        end = loop.time() + s.connect_timeout
        wait = _FIRST_WAIT
        why: BaseException | None = None
        while (left := end - loop.time()) > 0:
            try:
                conn = await asyncio.wait_for(Connection.dial(s, self._leave), left)
                if not conn.open:
                    raise ConnectionLost("the router left at once")
                self._conn = conn
                return conn
            except CannotConnect as e:
                if e.code not in ("", "draining"):
                    raise CannotConnect(f"{s.address}: {e.message}", e.code) from None
                why = e
            except ssl.SSLError as e:
                raise CannotConnect(f"{s.address}: {e}") from e
            except asyncio.TimeoutError as e:
                why = why or e
            except (OSError, EngineAPIError) as e:
                why = e
            await asyncio.sleep(min(wait, max(0.0, end - loop.time())))
            wait = min(2 * wait, _LONGEST_WAIT)
        reported = str(why) or "no answer"
        raise CannotConnect(f"{s.address}: not within {s.connect_timeout:g} s: {reported}") from why

    def _leave(self, conn: Connection) -> None:
        """Records that conn takes no new requests."""
        if self._conn is conn:
            self._conn = None
        if conn.error is None:
            self._leaving.add(conn)
        else:
            self._leaving.discard(conn)


class Answer:
    """An asynchronous iterator over the items of one answer, for one task.

    Leaving it early is a kill: by a break out of `async for`, by the task's
    cancellation, by aclose(), at the end of `async with`, or when nobody holds it.
    """

    def __init__(self, engine: EngineClient, request: Request | Mapping[str, Any], context: Context | None) -> None:
        self._engine = engine
        self._request = request
        self._own = context is None  # the caller passed no context
        self.context = context if context is not None else Context()
        self._stream = Stream(engine._settings.window)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = False
        self._over = False

    def __aiter__(self) -> Answer:
        return self

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def __anext__(self) -> Item:
        if self._over:
            raise StopAsyncIteration
        try:
            if not self._begun:
                self._begun = True
                self._loop = asyncio.get_running_loop()
                if (early := await self._begin()) is not None:
                    return early
            payload = await self._stream.take()
            if payload is None:
                self._end()
                raise StopAsyncIteration
            try:
                return decode(payload)
            except ValueError as e:
                raise ProtocolError(f"an item that cannot be read: {e}", "protocol") from e
        except StopAsyncIteration:
            raise
        except BaseException:  # cancellation too
            self._end()
            raise

    async def aclose(self) -> None:
        """Kills the request unless it has ended."""
        self._end()

    async def _begin(self) -> Item | None:
        """Sends the request. Returns an item if the request has ended before."""
        context, stream = self.context, self._stream
        if context.killed:
            raise Killed("the context was killed before the request was sent", "killed")
        left = context.remaining()
        if left is not None:
            if left <= 0:
                raise DeadlineExceeded("the context's deadline was over before the request was sent")
            stream.limit(left)
        context._calls.add(stream)
        if not context.stopped:
            conn = await self._engine._connection(stream)
            if conn is not None and not stream.ended and not stream.stopped:
                await conn.request(self._payload, stream)
        if context.stopped and not stream.sent:
            self._end()
            return Item(Output(token_ids=[], finish_reason="cancelled"))
        return None

    def _payload(self) -> bytes:
        members = self.context.wire()
        if self._own and isinstance(self._request, Mapping) and self._request.get("context"):
            members = {}
        return encode(self._request, members)

    def _end(self) -> None:
        self._over = True
        self.context._calls.discard(self._stream)
        self._stream.kill()

    def __del__(self) -> None:
        stream = self._stream
        if not self._begun or self._over or self._loop is None or self._loop.is_closed():
            return
        # The garbage collector may run this in another thread.
        self._loop.call_soon_threadsafe(_drop, self.context, stream)


def _drop(context: Context, stream: Stream) -> None:
    context._calls.discard(stream)
    stream.kill()
