"""One connection to a router: handshake, frames in and out, heartbeats.

It is an asyncio protocol and no task: everything happens in the loop's callbacks,
and its timers end with it.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Any, Callable

from . import frames
from .errors import CannotConnect, ConnectionLost, ProtocolError, Refused, EngineAPIError, StreamFailed, again, stream_error
from .frames import Kind
from .stream import Stream

_WRITE_BUFFER = 1 << 20  # unsent bytes above which new requests wait
_WRITE_MOST = 16 << 20  # unsent bytes above which the connection is closed


@dataclass(frozen=True)
class Settings:
    address: str
    token: str | None = field(repr=False)
    key: str | None = field(repr=False)
    tls: ssl.SSLContext | None
    server_hostname: str | None
    window: int
    agent: str
    connect_timeout: float
    write_timeout: float

    def dialed(self) -> tuple[str, str, int]:
        """Returns ("unix", path, 0) or ("tcp", host, port). Raises ValueError for another address."""
        network, _, rest = self.address.partition("://")
        if network == "unix" and rest:
            return network, rest, 0
        host, _, port = rest.rpartition(":")
        if network == "tcp" and host and port.isdigit() and 0 < int(port) < 65536:
            return network, host.strip("[]"), int(port)
        raise ValueError(f"address is {self.address!r}; want unix:///PATH or tcp://HOST:PORT")


class Connection(asyncio.Protocol):
    def __init__(self, settings: Settings, closing: Callable[[Connection], None]) -> None:
        """closing is called when no new stream may be opened any more, once or twice."""
        self._settings = settings
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._parser = frames.Parser()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Stream] = {}
        self._last = 0
        self._paused: set[Stream] | None = None  # requests that wait to be written
        self._stalled: asyncio.TimerHandle | None = None
        self._beat_timer: asyncio.TimerHandle | None = None
        self._heard = self._loop.time()
        self._beat = 15.0
        self._max_frame = 0
        self._max_streams = 0
        self._goaway: Refused | None = None
        self.error: EngineAPIError | None = None  # why it is closed, None while it is open
        self.server = ""  # name that the router gives
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.lost: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def dial(cls, settings: Settings, closing: Callable[[Connection], None]) -> Connection:
        """Connects and shakes hands. Raises OSError, or CannotConnect with the router's reason."""
        network, host, port = settings.dialed()
        loop = asyncio.get_running_loop()
        name = (settings.server_hostname or host if network == "tcp" else settings.server_hostname or "") if settings.tls else None
        made = lambda: cls(settings, closing)  # noqa: E731
        if network == "unix":
            _, conn = await loop.create_unix_connection(made, host, ssl=settings.tls, server_hostname=name)
        else:
            _, conn = await loop.create_connection(made, host, port, ssl=settings.tls, server_hostname=name)
        try:
            await conn.welcomed
        except BaseException:
            conn.close()
            raise
        return conn

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        s = self._settings
        transport.write(frames.hello(s.token, s.key, s.window, s.agent))

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            for kind, stream, payload in self._parser.feed(data):
                if self.error is not None:
                    return
                self._frame(kind, stream, payload)
        except ProtocolError as e:
            self.fail(e, tell=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(ConnectionLost(f"the router closed the connection{f': {exc}' if exc else ''}"))
        if self._stalled is not None:
            self._stalled.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        if self._paused is None and self.error is None:
            self._paused = set()
            after = self._settings.write_timeout
            self._stalled = self._loop.call_later(after, self.fail, ConnectionLost(f"the router took nothing for {after:g} s"))

    def resume_writing(self) -> None:
        if self.error is not None:
            return  # the timer of the end is running
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        waiting, self._paused = self._paused or (), None
        for stream in waiting:
            stream.wake()

    # Called by the engine and by streams.

    @property
    def open(self) -> bool:
        """Reports whether a new stream may be opened."""
        return self.error is None and self._goaway is None and self._last < frames.MAX_STREAM

    @property
    def idle(self) -> bool:
        return not self._streams

    async def request(self, make: Callable[[], bytes], stream: Stream) -> None:
        """Opens stream with the payload that make returns, once there is space to write it."""
        while (waiting := self._paused) is not None and len(self._streams) + len(waiting) < self._max_streams:
            waiting.add(stream)
            try:
                await stream.until(lambda: self._paused is not waiting)
            finally:
                waiting.discard(stream)
            if stream.ended or stream.stopped:
                return
        if self.error is not None:
            raise again(self.error)
        if self._goaway is not None or self._last >= frames.MAX_STREAM:
            raise again(self._goaway or Refused("the connection has no stream ids left", "draining"))
        if len(self._streams) >= self._max_streams or self._paused is not None:
            raise Refused(f"{len(self._streams)} requests are in flight on the connection; it takes {self._max_streams}", "too_many_streams")
        payload = make()
        if len(payload) > self._max_frame:
            raise StreamFailed(f"a request of {len(payload)} bytes; the router takes {self._max_frame}", "too_large")
        self._last += 1
        self._streams[self._last] = stream
        stream.opened(self, self._last)
        self._write(frames.frame(Kind.REQUEST, self._last, payload))
        if self._last == frames.MAX_STREAM:
            self._closing(self)

    def send(self, kind: Kind, stream: int) -> None:
        self._write(frames.frame(kind, stream))

    def give_credit(self, stream: int, count: int) -> None:
        self._write(frames.credit(stream, count))

    def forget(self, stream: int) -> None:
        self._streams.pop(stream, None)
        self._leave_when_idle()

    def close(self) -> None:
        """Ends the connection; the router kills the requests in progress."""
        if self.error is None and self._transport is not None:
            self._write(frames.frame(Kind.ERROR, 0))
        self.fail(ConnectionLost("the connection was closed by its owner"))

    def abort(self) -> None:
        """Closes the connection at once, without telling the router."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: EngineAPIError, tell: bool = False) -> None:
        """Closes the connection; all of its streams end with error."""
        if self.error is not None:
            return
        if tell:
            self._write(frames.frame(Kind.ERROR, 0, frames.pack({"code": error.code, "message": error.message})))
        self.error = error
        for timer in (self._beat_timer, self._stalled):
            if timer is not None:
                timer.cancel()
        if self._transport is not None:
            if self._paused is not None:
                self._transport.abort()
            else:
                self._transport.close()  # after everything written has been sent
                self._stalled = self._loop.call_later(self._settings.write_timeout, self._transport.abort)
        waiting, self._paused = self._paused or (), None
        for s in waiting:
            s.wake()
        streams, self._streams = list(self._streams.values()), {}
        for s in streams:
            s.finish(error)
        if not self.welcomed.done():
            self.welcomed.set_exception(CannotConnect(error.message, error.code))
            self.welcomed.exception()  # retrieves the exception, because the task that dialled may have ended
        self._closing(self)

    # Internal.

    def _write(self, data: bytes) -> None:
        if self.error is not None or self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _WRITE_MOST:
            self.fail(ConnectionLost(f"{_WRITE_MOST} bytes wait to be taken by the router"))

    def _frame(self, kind: Kind, number: int, payload: bytes) -> None:
        if not self.welcomed.done():
            self._welcome(kind, payload)
        elif kind is Kind.ITEM:
            stream = self._streams.get(number)
            if stream is not None:  # None: it was killed
                stream.put(payload)
        elif kind is Kind.END:
            stream = self._streams.pop(number, None)
            if stream is not None:
                why = frames.reason(payload)
                stream.finish(None if why is None else stream_error(*why))
            self._leave_when_idle()
        elif kind is Kind.PING:
            self._write(frames.frame(Kind.PONG, 0, payload))
        elif kind is Kind.PONG:
            pass
        elif kind is Kind.GOAWAY:
            why = frames.reason(payload) or ("draining", "the router takes no more requests")
            self._goaway = Refused(why[1], why[0])
            self._closing(self)
            self._leave_when_idle()
        elif kind is Kind.ERROR:
            code, message = frames.reason(payload) or ("", "the router left")
            self.fail(ConnectionLost(message, code))
        else:
            raise ProtocolError(f"a frame {kind.name}, which is not the router's to send", "protocol")

    def _welcome(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.ERROR:
            code, message = frames.reason(payload) or ("", "the router left")
            self.fail(CannotConnect(message, code))
            return
        if kind is not Kind.WELCOME:
            raise ProtocolError(f"the first frame is {kind.name}; want WELCOME", "protocol")
        try:
            m = frames.unpack(payload)
        except ValueError as e:
            raise ProtocolError(f"WELCOME cannot be read: {e}", "protocol") from e
        if not isinstance(m, dict):
            raise ProtocolError(f"WELCOME is a {type(m).__name__}; want a map", "protocol")
        if m.get("protocol") != frames.PROTOCOL or m.get("version") != frames.VERSION:
            found = f"version {m.get('version')!r} of {m.get('protocol')!r}"
            raise ProtocolError(f"WELCOME: {found}; want {frames.VERSION} of {frames.PROTOCOL!r}", "version")
        self._max_frame = _positive(m, "max_frame")
        self._max_streams = _positive(m, "max_streams")
        self._beat = _positive(m, "heartbeat_ms") / 1000
        self.server = str(m.get("agent", ""))
        self.welcomed.set_result(None)
        self._beat_timer = self._loop.call_later(self._beat / 2, self._heartbeat)

    def _heartbeat(self) -> None:
        quiet = self._loop.time() - self._heard
        if quiet > 3 * self._beat:
            self.fail(ConnectionLost(f"no frame was received from the router for {quiet:.1f} s", "heartbeat"))
            return
        if quiet > self._beat / 2:
            self._write(frames.frame(Kind.PING, 0))
        if self.error is None:
            self._beat_timer = self._loop.call_later(self._beat / 2, self._heartbeat)

    def _leave_when_idle(self) -> None:
        if self._goaway is not None and not self._streams:
            self.close()


def _positive(m: dict[Any, Any], name: str) -> int:
    value = m.get(name)
    if type(value) is not int or not 0 < value < 1 << 48:
        raise ProtocolError(f"WELCOME: {name} is {value!r}; want a number above 0", "protocol")
    return value
