"""Child processes: start, logs, stop."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time

_reserved = set()


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def free_port(count=1):
    """Returns the first of `count` consecutive loopback ports that are free now.

    The ports are below the system's ephemeral range, so that no other process gets one of
    them in the minutes until an engine binds it.
    """
    for _ in range(200):
        first = random.randrange(20_000, 32_000)
        ports = range(first, first + count)
        if _reserved.intersection(ports):
            continue
        with contextlib.ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        _reserved.update(ports)
        return first
    raise RuntimeError(f"no {count} consecutive free ports on loopback")


class Process:
    """One child in a process group of its own, with its output in RUN/<name>.log."""

    def __init__(self, run_dir, name, argv, env=None, stdout=None):
        self.name = name
        self.log = os.path.join(run_dir, name + ".log")
        with open(self.log, "wb") as log:
            self.popen = subprocess.Popen(
                argv,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout or log,
                stderr=log,
                start_new_session=True,
            )
        # The shell's trap ends these groups if this process is killed.
        with open(os.path.join(run_dir, "groups"), "a", encoding="ascii") as f:
            f.write(f"{self.popen.pid}\n")

    def alive(self):
        return self.popen.poll() is None

    def log_tail(self, lines=25):
        with open(self.log, encoding="utf-8", errors="replace") as f:
            return "".join(f.readlines()[-lines:])

    @contextlib.contextmanager
    def stopped(self):
        """Stops the whole group with SIGSTOP for the duration of the block."""
        os.killpg(self.popen.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # the block killed it
                os.killpg(self.popen.pid, signal.SIGCONT)

    def kill(self):
        """Sends SIGKILL to the whole group, as in a crash."""
        os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def stop(self, timeout=20):
        """Sends SIGTERM to the child, and after at most `timeout` seconds SIGKILL to the group.

        Returns the exit status of the child.
        """
        if self.alive():
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        return self.popen.wait()
