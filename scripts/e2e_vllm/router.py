"""Starts the router under test and sends requests to it."""

import os
import subprocess
import time

import http_calls
from processes import Process, say


class Router:
    """`sluice serve` configured by flags; records each body that a client received."""

    def __init__(self, binary, run_dir, name, flags, more=None):
        self.binary = binary
        self.bodies = []
        self.runtime_file = os.path.join(run_dir, name + ".json")
        env = {
            "SLUICE_ADMIN_RUNTIME_FILE": self.runtime_file,
            # The engines and the router share a few cores, so a healthy engine can answer
            # late during a step.
            "SLUICE_HEALTH_TIMEOUT": "10s",
            "SLUICE_TOKENS_TIMEOUT": "10s",
            **(more or {}),
        }
        argv = [binary, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "debug", *flags]
        say(" ".join(argv[1:]))
        self.process = Process(run_dir, name, argv, env, stdout=subprocess.PIPE)
        line = self.process.popen.stdout.readline().decode().strip()
        if not line:
            raise RuntimeError(f"the router did not start:\n{self.process.log_tail()}")
        self.url = line if line.startswith("http") else "http://" + line

    def wait_ready(self, timeout=120):
        end = time.monotonic() + timeout
        answer = None
        while time.monotonic() < end:
            if not self.process.alive():
                break
            answer = http_calls.get(self.url, "/readyz", timeout=30)
            if answer.status == 200:
                return
            time.sleep(0.3)
        seen = answer.text() if answer else ""
        raise RuntimeError(f"the router is not ready: {seen}\n{self.process.log_tail()}")

    def ask(self, path, body, headers=None, timeout=300):
        answer = http_calls.post(self.url, path, body, headers, timeout)
        self.bodies.append(answer.body)
        return answer

    def explain(self, request_id):
        """Returns the exit status and the output of `sluice explain`, or its error message."""
        done = subprocess.run(
            [self.binary, "explain", "--runtime-file", self.runtime_file, request_id],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, (done.stdout or done.stderr).strip()

    def stop(self):
        """Sends SIGTERM and returns the exit status and the duration in seconds."""
        begun = time.monotonic()
        status = self.process.stop()
        return status, time.monotonic() - begun
