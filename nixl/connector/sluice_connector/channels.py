# SPDX-License-Identifier: Apache-2.0
"""Ways to the router. Each belongs to the reporter's thread alone."""

import time
import uuid
from typing import Optional

from .endpoint import Nixl


class Dead(Exception):
    """The channel has failed for good; the reporter takes the next."""


class ZmqChannel:
    """A PUSH socket. It holds at most QUEUE reports while the router is away;
    beyond that send says that nothing was sent."""

    name = "zmq"
    QUEUE = 4096

    def __init__(self, endpoint: str):
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, self.QUEUE)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # Without it a PUSH socket queues for a peer it has never reached, and
        # what was queued before a router's restart would reach the new one late.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(endpoint)

    def send(self, line: bytes) -> bool:
        try:
            # A moment's patience: right after connect there is no peer yet.
            if self._socket.poll(250, self._zmq.POLLOUT) == 0:
                return False
            self._socket.send(line, self._zmq.NOBLOCK)
            return True
        except self._zmq.Again:
            return False
        except self._zmq.ZMQError as e:
            raise Dead(str(e)) from e

    def busy(self) -> bool:
        return False  # ZMQ has a thread for that

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class NixlChannel:
    """An agent of our own, so that the engine's is never touched from here. It
    has no progress thread, which would burn a core while idle: busy makes the
    progress that sent notifications need, for a while after each."""

    name = "nixl"
    SETTLE = 0.5  # seconds: the first notification makes the connection

    def __init__(self, router: Nixl):
        self._until = 0.0
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as e:
            raise Dead(f"no NIXL here: {e}") from e
        try:
            self._agent = nixl_agent("sluice-connector-" + uuid.uuid4().hex, nixl_agent_config(enable_prog_thread=False))
            name = self._agent.add_remote_agent(router.metadata)
            self._peer = name.decode() if isinstance(name, bytes) else name
        except Exception as e:  # the bindings raise what they like
            raise Dead(f"cannot reach the router's agent (its NIXL is {router.version or 'unknown'}): {e}") from e

    def send(self, line: bytes) -> bool:
        try:
            self._agent.send_notif(self._peer, notif_msg=line)
        except Exception as e:
            raise Dead(f"notification refused: {e}") from e
        self._until = time.monotonic() + self.SETTLE
        return True

    def busy(self) -> bool:
        try:
            self._agent.get_new_notifs()
        except Exception as e:
            raise Dead(f"no progress: {e}") from e
        return time.monotonic() < self._until

    def close(self) -> None:
        try:
            self._agent.remove_remote_agent(self._peer)
        except Exception:
            pass
        self._agent = None  # its end waits for nothing


def open_channel(kind: str, endpoint, log) -> Optional[object]:
    """The best channel of endpoint that kind allows, or None, with the reasons logged."""
    if kind in ("auto", "nixl") and endpoint.nixl:
        try:
            return NixlChannel(endpoint.nixl)
        except Dead as e:
            log(f"NIXL to the router is off: {e}")
    if kind in ("auto", "zmq") and endpoint.zmq:
        try:
            return ZmqChannel(endpoint.zmq)
        except Exception as e:
            log(f"ZMQ to the router at {endpoint.zmq} is off: {e}")
    return None
