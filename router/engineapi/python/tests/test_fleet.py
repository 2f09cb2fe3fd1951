"""The package against a real router over simulated engines."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import ssl
import subprocess
import unittest
from pathlib import Path
from unittest import mock

from fleet import AsyncCase, Fleet, TIMEOUT, free_port
from sluice_engineapi import CannotConnect, ConnectionLost, Context, DeadlineExceeded, Killed, Refused, Request, EngineClient, StreamFailed

LONG = 100_000  # tokens: a request that does not end by itself


def prompt(n: int, salt: int = 0) -> list[int]:
    return [300 + (i * 7 + salt * 131) % 900 for i in range(n)]


def request(n: int, salt: int = 0, **more) -> Request:
    return Request(
        token_ids=prompt(50, salt), model="sim", stop_conditions={"max_tokens": n, "ignore_eos": True},
        sampling_options={"temperature": 0}, **more,
    )


async def read(answer) -> tuple[list[int], list]:
    tokens, items = [], []
    async with asyncio.timeout(TIMEOUT) if hasattr(asyncio, "timeout") else answer:
        async for item in answer:
            items.append(item)
            if item.data():
                tokens += item.data().token_ids
    return tokens, items


class Families(AsyncCase):
    async def family(self, fleet: Fleet, legs: int, same: bool = True) -> None:
        self.addCleanup(fleet.end)
        async with EngineClient(fleet.address) as engine:
            context = Context("request-1", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", timeout=TIMEOUT)
            tokens, items = await read(engine.generate(request(40, annotations=["decision"]), context))
        self.assertFalse(any(i.is_error() for i in items), items)
        self.assertEqual(len(tokens), 40)
        self.assertGreater(len(items), 1)
        last = items[-1].data()
        self.assertEqual(last.finish_reason, "length")
        usage = last.completion_usage
        self.assertEqual((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (50, 40, 90))
        reported = [c.split(":")[0] for c in items[0].comments()]
        self.assertIn("worker_id", reported)
        self.assertEqual("prefill_worker_id" in reported, legs == 2, reported)
        if same:
            self.assertEqual(tokens, await asyncio.to_thread(fleet.undisturbed, prompt(50), 40))

    async def test_aggregated(self) -> None:
        await self.family(Fleet(("--engine", ["--speed", "inf"])), 1)

    async def test_nixl(self) -> None:
        sides = [(f"--{role}", ["--role", role, "--speed", "inf"]) for role in ("prefill", "decode")]
        await self.family(Fleet(*sides), 2)

    async def pair(self, family: str, *sim: str, options: str = "", decode: str = "", bootstrap: bool = False, serve: tuple[str, ...] = ()) -> None:
        """One prefill and one decode engine; options are the workers' at the router."""
        more = {"prefill": [], "decode": []}
        suffix = {"prefill": options, "decode": options + decode}
        if bootstrap:
            port = free_port()
            more["prefill"] = ["--bootstrap", f"127.0.0.1:{port}"]
            suffix["prefill"] += f",bootstrap_port={port}"
        sides = [(f"--{role}", ["--role", role, "--speed", "inf", *sim, *more[role]], suffix[role]) for role in ("prefill", "decode")]
        await self.family(Fleet(*sides, serve=["--pd", family, *serve]), 2, same=family != "sglang" and family != "trtllm")

    # The ninth, storage, has its store in one process: cmd/sluice tests it.

    async def test_sglang(self) -> None:
        await self.pair("sglang", "--engine", "sglang")

    async def test_nixl_push(self) -> None:
        await self.pair("nixl-push", "--pd", "nixl-push")

    async def test_mooncake(self) -> None:
        await self.pair("mooncake", "--pd", "mooncake", bootstrap=True)

    async def test_orchestrated(self) -> None:
        await self.pair("orchestrated", "--pd", "orchestrated")

    async def test_trtllm(self) -> None:
        await self.pair("trtllm", "--engine", "trtllm", options=",engine=trtllm,kv_events=off")

    async def test_lmcache(self) -> None:
        notify, side = free_port(), free_port()
        serve = ("--set", "lmcache.proxy_host=127.0.0.1", "--set", f"lmcache.proxy_port={notify}")
        sides = [
            ("--prefill", ["--role", "prefill", "--speed", "inf", "--pd", "lmcache", "--lmcache-proxy", f"tcp://127.0.0.1:{notify}"]),
            ("--decode", ["--role", "decode", "--speed", "inf", "--pd", "lmcache", "--side-port", str(side)], f",init_port={side},alloc_port={side}"),
        ]
        await self.family(Fleet(*sides, serve=["--pd", "lmcache", *serve]), 2)


class OneFleet(AsyncCase):
    """What is the same for all families, on one prefill and one decode engine."""

    @classmethod
    def setUpClass(cls) -> None:
        sim = ["--blocks", "200000", "--max-num-seqs", "4000"]
        cls.fleet = Fleet(
            ("--prefill", ["--role", "prefill", "--speed", "20", *sim]), ("--decode", ["--role", "decode", "--speed", "20", *sim]),
            serve=["--set", "limits.engine_conns=6000", "--set", "health.timeout=20s", "--set", "health.unhealthy_threshold=100"],
        )

    @classmethod
    def tearDownClass(cls) -> None:
        cls.fleet.end()

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.engine = EngineClient(self.fleet.address, window=2048)

    async def asyncTearDown(self) -> None:
        await self.engine.close()
        await self.until("the engines have nothing in flight", lambda: self.fleet.running() == 0)
        await super().asyncTearDown()

    async def test_stop(self) -> None:
        context = Context()
        tokens, last = [], None
        async for last in self.engine.generate(request(LONG), context):
            tokens += last.data().token_ids
            if len(tokens) > 5 and not context.stopped:
                context.stop()
        data = last.data()
        self.assertEqual(data.finish_reason, "cancelled")
        self.assertEqual(data.completion_usage.completion_tokens, len(tokens))
        self.assertEqual(tokens, await asyncio.to_thread(self.fleet.undisturbed, prompt(50), len(tokens)))

    async def test_stopped_before(self) -> None:
        context = Context()
        context.stop()
        tokens, items = await read(self.engine.generate(request(LONG), context))
        self.assertEqual((tokens, [i.data().finish_reason for i in items]), ([], ["cancelled"]))

    async def test_kill(self) -> None:
        context = Context()
        with self.assertRaises(Killed):
            async for _ in self.engine.generate(request(LONG), context):
                context.kill()
        with self.assertRaises(Killed):
            await read(self.engine.generate(request(LONG), context))

    async def test_leaving(self) -> None:
        async for _ in self.engine.generate(request(LONG)):
            break
        gc.collect()
        await self.until("a break is a kill", lambda: self.fleet.running() == 0)

        async with self.engine.generate(request(LONG)) as answer:
            await answer.__anext__()
        await self.until("the end of async with is a kill", lambda: self.fleet.running() == 0)

        seen = asyncio.Event()

        async def follow() -> None:
            async for _ in self.engine.generate(request(LONG)):
                seen.set()

        task = asyncio.create_task(follow())
        await asyncio.wait_for(seen.wait(), TIMEOUT)
        self.assertGreater(await asyncio.to_thread(self.fleet.running), 0)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await self.until("cancelling the task is a kill", lambda: self.fleet.running() == 0)
        self.assertEqual(len((await read(self.engine.generate(request(3))))[0]), 3)  # the connection lives on

    async def test_vanishing_caller(self) -> None:
        gone = EngineClient(self.fleet.address)
        answers = [gone.generate(request(LONG, i)) for i in range(5)]
        await asyncio.gather(*(a.__anext__() for a in answers))
        self.assertGreater(await asyncio.to_thread(self.fleet.running), 0)
        gone._conn.abort()
        for a in answers:
            with self.assertRaises(ConnectionLost):
                await read(a)
        await self.until("a lost caller is a kill", lambda: self.fleet.running() == 0)
        await gone.close()

    async def test_slow_consumer(self) -> None:
        slow = self.engine.generate(request(1000))
        first = await slow.__anext__()
        stream = slow._stream
        for i in range(20):  # others pass it by
            self.assertEqual(len((await read(self.engine.generate(request(30, i))))[0]), 30)
        held = sum(map(len, stream._items))
        self.assertGreater(held, 0)
        self.assertLess(held, 2048 + 4096)
        self.assertFalse(stream.ended)
        tokens, _ = await read(slow)
        self.assertEqual(first.data().token_ids + tokens, await asyncio.to_thread(self.fleet.undisturbed, prompt(50), 1000))

    async def test_error_item(self) -> None:
        wrong = request(3)
        wrong.sampling_options = {"temperature": "hot"}
        _, items = await read(self.engine.generate(wrong))
        self.assertEqual([i.is_error() for i in items], [True])
        self.assertEqual((items[0].error().param, items[0].error().code), ("sampling_options.temperature", 400))
        self.assertEqual(items[0].comments(), [items[0].error().message])
        with self.assertRaisesRegex(StreamFailed, "too_large"):
            await read(self.engine.generate(Request(token_ids=[70000] * 2_000_000)))
        with self.assertRaisesRegex(ValueError, "cannot write 'extra_args'"):
            await read(self.engine.generate(request(3, extra={"extra_args": object()})))
        with self.assertRaisesRegex(ValueError, "'model' has a field of its own".replace("'model'", r"extra\['model'\]")):
            await read(self.engine.generate(request(3, extra={"model": "x"})))

    async def test_deadline(self) -> None:
        _, items = await read(self.engine.generate(request(LONG), Context(timeout=0.5)))
        self.assertTrue(items[-1].is_error())
        self.assertEqual(items[-1].error().code, 504)
        with self.assertRaises(DeadlineExceeded):
            await read(self.engine.generate(request(3), Context(deadline=0.0)))

    async def test_deadline_of_a_slow_reader(self) -> None:
        with mock.patch("sluice_engineapi.stream._GRACE", TIMEOUT):  # the router says it, not the client's own clock
            async with EngineClient(self.fleet.address, window=1) as engine:
                answer = engine.generate(request(LONG), Context(timeout=5))
                await answer.__anext__()
                for _ in range(int(TIMEOUT / 0.02)):
                    if answer._stream.ended:
                        break
                    await asyncio.sleep(0.02)
                with self.assertRaises(DeadlineExceeded) as ended:
                    await read(answer)
                self.assertEqual(ended.exception.code, "deadline")

    async def test_mapping(self) -> None:
        bare = {"model": "sim", "token_ids": prompt(20), "stop_conditions": {"max_tokens": 4, "ignore_eos": True}, "context": {"id": "mine"}}
        self.assertEqual(len((await read(self.engine.generate(bare)))[0]), 4)

    async def test_thousands(self) -> None:
        n = 3000
        answers = [self.engine.generate(request(3, i % 7)) for i in range(n)]
        done = await asyncio.gather(*map(read, answers))
        bad = [items for tokens, items in done if len(tokens) != 3]
        self.assertEqual((len(bad), bad[:1]), (0, []))
        self.assertTrue(self.engine._conn.idle)

    async def test_nobody_listens(self) -> None:
        nobody = EngineClient("unix:///nonexistent/r.sock", connect_timeout=0.3)
        done = await asyncio.gather(*(read(nobody.generate(request(3))) for _ in range(3)), return_exceptions=True)
        self.assertEqual([type(e) for e in done], [CannotConnect] * 3)
        self.assertIn("unix:///nonexistent/r.sock", str(done[0]))
        patient = EngineClient("unix:///nonexistent/r.sock", connect_timeout=60)
        context = Context()
        asyncio.get_running_loop().call_later(0.1, context.kill)
        with self.assertRaises(Killed):  # no wait for the connection
            await asyncio.wait_for(read(patient.generate(request(3), context)), TIMEOUT / 2)
        await patient.close()


class Restart(AsyncCase):
    async def test_restart(self) -> None:
        fleet = Fleet(("--engine", ["--speed", "20"]))
        self.addCleanup(fleet.end)
        engine = EngineClient(fleet.address, connect_timeout=TIMEOUT)
        answer = engine.generate(request(LONG))
        await answer.__anext__()
        await asyncio.to_thread(fleet.router.end)
        with self.assertRaises(ConnectionLost):
            await read(answer)
        later = asyncio.gather(*(read(engine.generate(request(5, i))) for i in range(10)))  # while nobody listens
        await asyncio.to_thread(fleet.start)
        self.assertEqual([len(tokens) for tokens, _ in await later], [5] * 10)

        # One that leaves in order lets what is in progress come to its end.
        answer = engine.generate(request(400))
        head = (await answer.__anext__()).data().token_ids
        end = asyncio.create_task(asyncio.to_thread(fleet.router.end, signal.SIGTERM))
        tail, items = await read(answer)
        self.assertEqual((len(head + tail), items[-1].data().finish_reason), (400, "length"))
        await end
        await asyncio.to_thread(fleet.start)
        self.assertEqual(len((await read(engine.generate(request(5))))[0]), 5)
        await engine.close()


def children(pid: int) -> list[int]:
    return [int(child) for listed in Path(f"/proc/{pid}/task").glob("*/children") for child in listed.read_text().split()]


class HotRestart(AsyncCase):
    async def test_hot_restart(self) -> None:
        """The socket is passed on: no request fails, an old stream goes on while new ones are the new process's."""
        fleet = Fleet(("--engine", ["--speed", "20"]), serve=["--drain", "120s"])
        self.addCleanup(fleet.end)
        async with EngineClient(fleet.address, connect_timeout=TIMEOUT) as engine:
            context = Context()
            old = engine.generate(request(20_000), context)
            self.assertIsNotNone((await old.__anext__()).data())
            first, refused, process = engine._conn, 0, fleet.router.run
            process.send_signal(signal.SIGUSR2)
            async with EngineClient(fleet.address) as other:
                while engine._conn is first and refused == 0:  # up to the old process's farewell
                    for e in (engine, other):
                        try:
                            self.assertEqual(len((await read(e.generate(request(3))))[0]), 3)
                        except Refused as why:  # it met the farewell on the way: nothing was done, it may be sent again
                            self.assertEqual(why.code, "draining")
                            refused += 1
                    await asyncio.sleep(0.05)
            for child in children(process.pid):  # the new process
                self.addCleanup(os.kill, child, signal.SIGKILL)
            self.assertIsNotNone((await old.__anext__()).data())
            tokens, _ = await read(engine.generate(request(5)))
            self.assertEqual(len(tokens), 5)
            context.stop()
            _, items = await read(old)
            self.assertEqual(items[-1].data().finish_reason, "cancelled")
        await self.until("the old process has ended", lambda: process.poll() is not None)


class Keys(AsyncCase):
    async def test_keys(self) -> None:
        key = "sk-sluice-of-a-team"
        fleet = Fleet(("--engine", ["--speed", "inf"]))
        self.addCleanup(fleet.end)
        fleet.router.end()
        config = f"{fleet.dir.name}/sluice.yaml"
        with open(config, "w", encoding="ascii") as f:
            f.write(f"api_keys: [{{name: team, sha256: {hashlib.sha256(key.encode()).hexdigest()}, models: [sim], requests_per_minute: 2}}]\n")
        fleet.args += ["--config", config]
        fleet.start()
        for wrong in (None, key + "x"):
            with self.assertRaisesRegex(CannotConnect, "unauthorized.*key"):
                await EngineClient(fleet.address, key=wrong, connect_timeout=TIMEOUT).connect()
        async with EngineClient(fleet.address, key=key) as engine:
            self.assertNotIn(key, repr(engine) + repr(vars(engine)))
            self.assertEqual(len((await read(engine.generate(request(3))))[0]), 3)
            other = request(3)
            other.model = "other"
            for refused, code in ((other, 403), (request(3), 429)):
                _, items = await read(engine.generate(refused))
                self.assertEqual([i.error().code for i in items], [code])


class OverTCP(AsyncCase):
    async def test_tls_and_token(self) -> None:
        port, token = free_port(), "0123456789abcdef-secret"
        fleet = Fleet(("--engine", ["--speed", "inf"]))
        self.addCleanup(fleet.end)
        cert, key = f"{fleet.dir.name}/cert.pem", f"{fleet.dir.name}/key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", "/CN=router", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
            check=True, capture_output=True,
        )  # fmt: skip
        fleet.router.end()
        for member in (f"listen=127.0.0.1:{port}", f"token={token}", f"tls_cert={cert}", f"tls_key={key}"):
            fleet.args += ["--set", f"engine_api.{member}"]
        fleet.start()
        trusted = ssl.create_default_context(cafile=cert)
        async with EngineClient(f"tcp://127.0.0.1:{port}", token=token, tls=trusted) as engine:
            self.assertEqual(len((await read(engine.generate(request(5))))[0]), 5)
            self.assertNotIn(token, repr(engine) + repr(vars(engine)))
        with self.assertRaisesRegex(CannotConnect, "unauthorized"):
            await EngineClient(f"tcp://127.0.0.1:{port}", token="another-token-1234", tls=trusted).connect()
        with self.assertRaisesRegex(CannotConnect, "certificate"):
            await EngineClient(f"tcp://127.0.0.1:{port}", token=token, tls=True).connect()


if __name__ == "__main__":
    unittest.main()
