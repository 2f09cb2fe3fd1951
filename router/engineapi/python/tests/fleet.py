"""Simulated engines and a router, as processes of the built binary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
SLUICE = os.environ.get("SLUICE_BIN") or str(ROOT / "bin" / "sluice")
TIMEOUT = 60.0  # of anything that is waited for; the machine may be busy
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    """A port free at this moment, below the range that the system gives out by itself."""
    for _ in range(200):
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port in 200 tries")


def http(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with _opener.open(request, timeout=TIMEOUT) as answer:
        return answer.read()


def eventually(what: str, check) -> None:
    end = time.monotonic() + TIMEOUT
    while not check():
        if time.monotonic() > end:
            raise AssertionError(f"not within {TIMEOUT} s: {what}")
        time.sleep(0.02)


class Process:
    """A running sluice; url is the address that it prints first."""

    def __init__(self, *args: str) -> None:
        self.log = tempfile.TemporaryFile("w+")
        self.run = subprocess.Popen([SLUICE, *args], stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.run.stdout.readline().strip()
        if not line:
            raise AssertionError(f"sluice {args} did not start:\n{self.errors()}")
        self.url = f"http://{line}"

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def end(self, how: int = signal.SIGKILL) -> None:
        self.run.send_signal(how)
        self.run.wait(TIMEOUT)
        self.run.stdout.close()
        self.log.close()


class Fleet:
    """engines: their flag at `sluice serve`, arguments of `sluice sim`, and what is said of them behind their URL."""

    def __init__(self, *engines: tuple[str, list[str]] | tuple[str, list[str], str], serve: list[str] = ()) -> None:
        self.dir = tempfile.TemporaryDirectory(prefix="sl")
        self.socket = f"{self.dir.name}/r.sock"
        self.address = f"unix://{self.socket}"
        self.router: Process | None = None
        self.engines: list[Process] = []
        self.args = ["serve", "--listen", "127.0.0.1:0", "--admin", "off", "--set", f"engine_api.unix_socket={self.socket}", *serve]
        try:
            for flag, args, *reported in engines:
                self.engines.append(Process("sim", *args))
                self.args += [flag, self.engines[-1].url + "".join(reported)]
            self.start()
        except BaseException:
            self.end()
            raise

    def start(self) -> None:
        self.router = Process(*self.args)

    def running(self) -> int:
        """Requests that engines have in flight."""
        return sum(metric(e.url, "requests_running") for e in self.engines)

    def undisturbed(self, tokens: list[int], n: int) -> list[int]:
        """What one vLLM engine, asked alone, makes of a prompt."""
        body = {"model": "sim", "prompt": tokens, "max_tokens": n, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
        return json.loads(http(self.engines[-1].url + "/v1/completions", body))["choices"][0]["token_ids"]

    def end(self) -> None:
        for p in [self.router, *self.engines]:
            if p is not None:
                p.end()
        self.dir.cleanup()


def metric(url: str, name: str) -> int:
    found = [line for line in http(url + "/metrics").decode().splitlines() if name in line.split("{")[0] and line[0] != "#"]
    if not found:
        raise AssertionError(f"{url}/metrics has no {name}")
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in found)


class AsyncCase(unittest.IsolatedAsyncioTestCase):
    """Fails a test that leaves a task or a running call-back's complaint behind."""

    async def asyncSetUp(self) -> None:
        self.complaints: list[dict] = []
        asyncio.get_running_loop().slow_callback_duration = 60  # no lines about a busy machine
        asyncio.get_running_loop().set_exception_handler(lambda _, c: self.complaints.append(c))
        self.tasks = asyncio.all_tasks()

    async def asyncTearDown(self) -> None:
        end = asyncio.get_running_loop().time() + 5
        while left := asyncio.all_tasks() - self.tasks - {asyncio.current_task()}:
            self.assertLess(asyncio.get_running_loop().time(), end, f"tasks left behind: {left}")
            await asyncio.sleep(0.01)
        self.assertEqual(self.complaints, [])

    async def until(self, what: str, check) -> None:
        end = asyncio.get_running_loop().time() + TIMEOUT
        while not await asyncio.to_thread(check):
            self.assertLess(asyncio.get_running_loop().time(), end, what)
            await asyncio.sleep(0.02)
