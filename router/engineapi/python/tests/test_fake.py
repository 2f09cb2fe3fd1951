"""What a router never does, by a server that does it: for this there is no real one."""

from __future__ import annotations

import asyncio
import gc
import struct
import tempfile
import time

import msgpack
from fleet import AsyncCase
from sluice_engineapi import CannotConnect, ConnectionLost, Context, DeadlineExceeded, Killed, ProtocolError, Refused, Request, EngineClient, StreamFailed

WELCOME = {"protocol": "sluice-routed", "version": 1, "max_frame": 1 << 20, "max_streams": 4, "heartbeat_ms": 60_000, "agent": "fake"}
HELLO, REQUEST, ITEM, END, CREDIT, STOP, KILL, PING, PONG, GOAWAY, ERROR = 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12


def frame(kind: int, stream: int = 0, payload: object = b"") -> bytes:
    if not isinstance(payload, bytes):
        payload = msgpack.packb(payload)
    return struct.pack(">IBI", len(payload), kind, stream) + payload


def item(*tokens: int, **data: object) -> dict:
    return {"data": {"token_ids": list(tokens), **data}}


class Fake:
    """A server that greets and then answers frames as the test specifies."""

    def __init__(self, answer=lambda kind, stream, payload: b"", welcome: bytes | None = None) -> None:
        self.answer, self.welcome = answer, frame(2, 0, WELCOME) if welcome is None else welcome
        self.heard: list[tuple[int, int, bytes]] = []
        self.connections = 0
        self.reading = asyncio.Event()
        self.reading.set()

    async def __aenter__(self) -> Fake:
        self.dir = tempfile.TemporaryDirectory(prefix="sl")
        self.address = f"unix://{self.dir.name}/s"
        self.server = await asyncio.start_unix_server(self.serve, f"{self.dir.name}/s")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.reading.set()
        self.server.close()
        self.dir.cleanup()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                size, kind, stream = struct.unpack(">IBI", await reader.readexactly(9))
                payload = await reader.readexactly(size)
                self.heard.append((kind, stream, payload))
                writer.write(self.welcome if kind == HELLO else self.answer(kind, stream, payload))
                await self.reading.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def kinds(self) -> list[int]:
        return [kind for kind, _, _ in self.heard]


def on_request(*frames_of):
    """Answers each request with frames, given the stream."""
    return lambda kind, stream, payload: b"".join(f(stream) for f in frames_of) if kind == REQUEST else b""


REQ = Request(token_ids=[1, 2])
OK = on_request(lambda s: frame(ITEM, s, item(7, finish_reason="stop")), lambda s: frame(END, s))


class Malformed(AsyncCase):
    async def ends(self, error: type[Exception], pattern: str, fake: Fake, **options) -> None:
        async with fake:
            engine = EngineClient(fake.address, connect_timeout=2, **options)
            with self.assertRaisesRegex(error, pattern):
                async for _ in engine.generate(REQ):
                    pass
            await engine.close()

    async def test_frames(self) -> None:
        for what, error, pattern, frames in [
            ("kind", ProtocolError, "kind 77", lambda s: frame(77, s)),
            ("client's own kind", ProtocolError, "CREDIT, which is not", lambda s: frame(CREDIT, s, b"\0\0\0\1")),
            ("second welcome", ProtocolError, "WELCOME, which is not", lambda s: frame(2, 0, WELCOME)),
            ("too large", ProtocolError, "too_large.*2147483647", lambda s: struct.pack(">IBI", 2**31 - 1, ITEM, s)),
            ("large ping", ProtocolError, "too_large", lambda s: frame(PING, 0, b"x" * 65)),
            ("no msgpack", ProtocolError, "cannot be read", lambda s: frame(ITEM, s, b"\xc1")),
            ("cut msgpack", ProtocolError, "cannot be read", lambda s: frame(ITEM, s, b"\x82\xa4data")),
            ("no map", ProtocolError, "the item is 5", lambda s: frame(ITEM, s, 5)),
            ("tokens", ProtocolError, "data.token_ids is 'x'; want integers", lambda s: frame(ITEM, s, {"data": {"token_ids": "x"}})),
            ("usage", ProtocolError, "completion_usage", lambda s: frame(ITEM, s, item(1, completion_usage={"prompt_tokens": "x"}))),
            ("nesting", ProtocolError, "cannot be read", lambda s: frame(ITEM, s, b"\x91" * 100_000)),
            ("key", ProtocolError, "cannot be read", lambda s: frame(ITEM, s, b"\x81\x90\x01")),
            ("no credit", ProtocolError, "no credit left", lambda s: 100 * frame(ITEM, s, item(*range(100)))),
            ("leaves", ConnectionLost, "too_many: go", lambda s: frame(ERROR, 0, {"code": "too_many", "message": "go"})),
            ("odd end", StreamFailed, "an error that is a int", lambda s: frame(END, s, 5)),
            ("refused", Refused, "draining: later", lambda s: frame(END, s, {"code": "draining", "message": "later"})),
            ("stalled", StreamFailed, "client_stalled", lambda s: frame(END, s, {"code": "client_stalled", "message": "x"})),
        ]:
            with self.subTest(what):
                await self.ends(error, pattern, Fake(on_request(frames)), window=1000)

    async def test_greetings(self) -> None:
        for what, pattern, welcome in [
            ("another protocol", "version.*'http'", frame(2, 0, {**WELCOME, "protocol": "http"})),
            ("another version", "version: .*version 2", frame(2, 0, {**WELCOME, "version": 2})),
            ("no limit", "max_streams is 0", frame(2, 0, {**WELCOME, "max_streams": 0})),
            ("no map", "WELCOME is a list", frame(2, 0, [])),
            ("no msgpack", "WELCOME cannot be read", frame(2, 0, b"\xc1")),
            ("another frame", "first frame is ITEM", frame(ITEM, 1, item(1))),
            ("text", "kind 47", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            ("refusal", "unauthorized: .*: no", frame(ERROR, 0, {"code": "unauthorized", "message": "no"})),
            ("silence", "not within 2 s", b""),
        ]:
            with self.subTest(what):
                await self.ends(CannotConnect, pattern, Fake(welcome=welcome))


class Behaviour(AsyncCase):
    async def test_shapes(self) -> None:
        """Bytes one by one, unknown members and streams, all of an item's members."""
        data = item(7, 8, index=1, log_probs=[-0.5, None], top_logprobs=[[{"rank": 1}], []], stop_reason=9, extra_args={"a": 1}, odd="x",
                    completion_usage={"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}})  # fmt: skip
        reply = lambda s: frame(ITEM, 99, item(1)) + frame(ITEM, s, {**data, "comment": ["c"], "id": "i"}) + frame(END, s)  # noqa: E731
        async with Fake(on_request(reply)) as fake, EngineClient(fake.address) as engine:
            conn = engine._conn
            whole, conn.data_received = conn.data_received, lambda d: [whole(d[i : i + 1]) for i in range(len(d))]
            got = [i async for i in engine.generate(Request(token_ids=[1], extra={"extra_args": {"k": [1]}}, sampling_options={"odd": 1}), Context("me", timeout=5))]
            (it,) = got
            out = it.data()
            self.assertEqual((it.comments(), it.extra, it.is_error()), (["c"], {"id": "i"}, False))
            self.assertEqual((out.token_ids, out.index, out.log_probs, out.stop_reason, out.extra), ([7, 8], 1, [-0.5, None], 9, {"odd": "x"}))
            self.assertEqual((out.completion_usage.total_tokens, out.completion_usage.cached_tokens), (4, 1))
            sent = msgpack.unpackb(next(p for k, _, p in fake.heard if k == REQUEST))
            context = sent.pop("context")
            self.assertEqual(sent, {"token_ids": [1], "extra_args": {"k": [1]}, "sampling_options": {"odd": 1}})
            self.assertEqual((context["id"], 4000 < context["timeout_ms"] <= 5000), ("me", True))

    async def test_kill_is_sent_once(self) -> None:
        async with Fake(on_request(lambda s: frame(ITEM, s, item(1)))) as fake, EngineClient(fake.address) as engine:
            for leave in ("break", "kill", "cancel"):
                answer, context = None, Context()
                answer = engine.generate(REQ, context)
                await answer.__anext__()
                if leave == "kill":
                    context.kill()
                    context.kill()
                    with self.assertRaises(Killed):
                        await answer.__anext__()
                elif leave == "cancel":
                    task = asyncio.create_task(answer.__anext__())
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                self.assertEqual(len(context._calls), 1 if leave == "break" else 0)
                del answer
                gc.collect()
                await asyncio.sleep(0)
                self.assertEqual(len(context._calls), 0)
                await self.until("KILL", lambda: KILL in fake.kinds())
                self.assertEqual(fake.kinds().count(KILL), 1, leave)
                self.assertTrue(engine._conn.idle)
                fake.heard.clear()

    async def test_too_many(self) -> None:
        async with Fake(on_request(lambda s: frame(ITEM, s, item(1)))) as fake, EngineClient(fake.address) as engine:
            held = [engine.generate(REQ) for _ in range(4)]
            await asyncio.gather(*(a.__anext__() for a in held))
            with self.assertRaisesRegex(Refused, "too_many_streams: 4 requests"):
                await engine.generate(REQ).__anext__()
            await held[0].aclose()
            await engine.generate(REQ).__anext__()

    async def test_goaway(self) -> None:
        async with Fake(OK) as fake:
            engine = EngineClient(fake.address)
            fake.answer = on_request(lambda s: frame(ITEM, s, item(1)), lambda s: frame(GOAWAY, 0, {"code": "draining", "message": "x"}))
            old = engine.generate(REQ)
            await old.__anext__()
            fake.answer = OK
            for _ in range(2):
                self.assertEqual(len([i async for i in engine.generate(REQ)]), 1)
            self.assertEqual((fake.connections, len(engine._leaving)), (2, 1))
            await old.aclose()  # the last of the old connection
            self.assertEqual(len(engine._leaving), 0)
            await engine.close()

    async def test_heartbeat(self) -> None:
        welcome = frame(2, 0, {**WELCOME, "heartbeat_ms": 100})
        alive = lambda k, s, p: frame(PONG, 0, p) + frame(PING, 0, b"you?") if k == PING else b""  # noqa: E731
        async with Fake(alive, welcome) as fake, EngineClient(fake.address) as engine:
            await self.until("PONG with the ping's bytes", lambda: (PONG, 0, b"you?") in fake.heard)
            fake.answer = lambda k, s, p: b""
            with self.assertRaisesRegex(ConnectionLost, "heartbeat: no frame was received"):
                await engine.generate(REQ).__anext__()

    async def test_a_server_that_does_not_read(self) -> None:
        async with Fake(OK, frame(2, 0, {**WELCOME, "max_streams": 100})) as fake:
            engine = EngineClient(fake.address, write_timeout=0.5)
            await engine.connect()
            fake.reading.clear()
            big = {"token_ids": [1], "extra_args": "x" * 900_000}
            done = await asyncio.gather(*(self.read(engine, big) for _ in range(50)), return_exceptions=True)
            failed = [e for e in done if isinstance(e, Exception)]
            self.assertGreater(len(failed), 40)  # the first may have been read
            self.assertEqual({(type(e), str(e)) for e in failed}, {(ConnectionLost, "the router took nothing for 0.5 s")})
            fake.reading.set()
            self.assertEqual(len(await self.read(engine, {"token_ids": [1]})), 1)
            await engine.close()

    @staticmethod
    async def read(engine: EngineClient, request: dict) -> list:
        return [i async for i in engine.generate(request)]

    async def test_deadline_that_the_router_forgets(self) -> None:
        async with Fake() as fake, EngineClient(fake.address) as engine:
            start = time.monotonic()
            with self.assertRaises(DeadlineExceeded):
                await engine.generate(REQ, Context(timeout=0.1)).__anext__()
            self.assertGreater(time.monotonic() - start, 1)
            await self.until("KILL", lambda: KILL in fake.kinds())

    async def test_close(self) -> None:
        async with Fake() as fake:
            engine = EngineClient(fake.address)
            waiting = asyncio.create_task(self.read(engine, {"token_ids": [1]}))
            await self.until("REQUEST", lambda: REQUEST in fake.kinds())
            await engine.close()
            with self.assertRaises(ConnectionLost):
                await waiting
            with self.assertRaisesRegex(ConnectionLost, "closed by its owner"):
                await self.read(engine, {"token_ids": [1]})
            await self.until("ERROR, the farewell", lambda: ERROR in fake.kinds())
