"""Starts vLLM engines on loopback and reads their metrics."""

import http.client
import json
import os
import time

import http_calls
from processes import Process, free_port, say

MODEL = "tiny"
BLOCK_SIZE = 32  # the CPU attention backend accepts only multiples of 32
BLOCKS = 400

ENVIRONMENT = {
    # An engine is three processes that each import vLLM: without bytecode files each compiles it again,
    # 40 s of CPU. An empty value is as good as none.
    "PYTHONDONTWRITEBYTECODE": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "NIXL_PTHR_DELAY_US": "1000",
}


class Engine:
    """One `vllm serve`. kv_role is kv_producer, kv_consumer or None. connector is the
    configuration of Sluice's connector, which then replaces vLLM's; kind is its class. more
    are further arguments."""

    def __init__(self, cache, run_dir, name, kv_role=None, ranks=1, connector=None, env=None, kind="NixlConnector", more=()):
        self.name = name
        self.ranks = ranks
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = [
            os.path.join(cache, "venv", "bin", "vllm"), "serve", os.path.join(cache, "model"),
            "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "32",
            "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS),
            "--enable-scale-out",  # opens /inference/v1/generate
            "--enable-log-requests",  # logs the request ids
            # With port 0 the engine binds only VLLM_HOST_IP; the router gets the port from
            # /kv_event_sources.
            "--kv-events-config", json.dumps({
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": "tcp://*:0",
                "replay_endpoint": "tcp://*:0",
            }),
        ]  # fmt: skip
        env = {**ENVIRONMENT, **(env or {})}
        if kv_role:
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(ranks))
            argv += ["--kv-transfer-config", json.dumps({
                "kv_connector": kind,
                "kv_role": kv_role,
                "kv_buffer_device": "cpu",
                **({
                    "kv_connector_module_path": "sluice_connector",
                    "kv_connector_extra_config": {"sluice": connector},
                } if connector else {}),
            })]  # fmt: skip
        argv += more
        if ranks > 1:
            argv += ["--data-parallel-size", str(ranks), "--data-parallel-address", "127.0.0.1"]
        self.process = Process(run_dir, name, argv, env)
        say(f"{name}: starting on {self.url}, log {self.process.log}")

    def alive(self):
        """Reports whether the server answers and considers its engine alive."""
        if not self.process.alive():
            return False
        try:
            return http_calls.get(self.url, "/health", timeout=30).status == 200
        except OSError:
            return False

    def metrics(self):
        return Metrics(http_calls.get(self.url, "/metrics", timeout=60).text())

    def kv_event_sources(self):
        return http_calls.get(self.url, "/kv_event_sources").json()

    def version(self):
        return http_calls.get(self.url, "/version").json()["version"]

    def stop(self):
        self.process.stop()


def wait_ready(engines, timeout=1800):
    """Waits until all engines answer /health; prints a line every 15 s."""
    begun = reported = time.monotonic()
    waiting = list(engines)
    while waiting:
        for engine in list(waiting):
            if not engine.process.alive():
                raise RuntimeError(f"{engine.name} ended while starting:\n{engine.process.log_tail()}")
            try:
                if http_calls.get(engine.url, "/health", timeout=5).status != 200:
                    continue
            except (OSError, http.client.HTTPException):
                continue
            say(f"{engine.name}: ready after {time.monotonic() - begun:.0f} s")
            waiting.remove(engine)
        now = time.monotonic()
        if waiting and now - begun > timeout:
            names = ", ".join(e.name for e in waiting)
            raise RuntimeError(f"not ready after {timeout} s: {names}\n{waiting[0].process.log_tail()}")
        if waiting and now - reported > 15:
            reported = now
            names = ", ".join(e.name for e in waiting)
            say(f"waiting for {names} ({now - begun:.0f} s; imports take a minute, longer on a busy machine)")
        time.sleep(0.5)


class Metrics:
    """A parsed Prometheus page: sum("name", label="value") adds the matching samples."""

    def __init__(self, text):
        self.samples = []
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            series, _, value = line.rpartition(" ")
            name, _, rest = series.partition("{")
            labels = {}
            # No label value of these metrics contains a comma.
            for pair in rest.rstrip("}").split(","):
                key, _, quoted = pair.partition("=")
                labels[key] = quoted.strip('"')
            self.samples.append((name, labels, float(value)))

    def sum(self, name, **want):
        return sum(
            value
            for sample, labels, value in self.samples
            if sample == name and all(labels.get(k) == v for k, v in want.items())
        )

    def source(self, source, **want):
        """Returns the number of prompt tokens whose KV came from the source."""
        return self.sum("vllm:prompt_tokens_by_source_total", source=source, **want)

    def kv_usage(self, **want):
        """Returns the share of KV blocks in use, 0 to 1, summed over the matching ranks."""
        return self.sum("vllm:kv_cache_usage_perc", **want)

    def usage_blocks(self, **want):
        return round(self.kv_usage(**want) * (BLOCKS - 1))  # block 0 is the engine's null block
