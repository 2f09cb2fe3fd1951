# SPDX-License-Identifier: Apache-2.0
"""Ways to the router. Each belongs to the reporter's thread alone."""

import ctypes
import time
import uuid
from typing import Optional

from .endpoint import Nixl, Ucx
from .report import RECORD_BYTES, CompletionSlot, message


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
            # Right after connect there is no peer yet: wait a moment.
            if self._socket.poll(250, self._zmq.POLLOUT) == 0:
                return False
            self._socket.send(line, self._zmq.NOBLOCK)
            return True
        except self._zmq.Again:
            return False
        except self._zmq.ZMQError as e:
            raise Dead(str(e)) from e

    def record(self, slot: CompletionSlot, record: bytes) -> bool:
        return self.send(message(slot, record))

    def idle(self) -> float:
        return 60.0  # ZMQ has a thread for what is left to do

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class NixlChannel:
    """An agent of our own, so that the engine's is never touched from here. It
    has no progress thread, which would burn a core while idle: idle makes the
    progress that sent notifications need, for a while after each."""

    name = "nixl"
    # Seconds in which progress is made every millisecond after a message: the
    # first makes the connection, which takes a starved machine long. After that
    # it is made now and then, for what was still in progress.
    CONNECT, SETTLE, SLOW = 5.0, 0.5, 0.1
    WRITE = 2.0  # seconds that a write may take

    def __init__(self, router: Nixl):
        self._until, self._settle = 0.0, self.CONNECT
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as e:
            raise Dead(f"no NIXL here: {e}") from e
        try:
            self._agent = nixl_agent("sluice-connector-" + uuid.uuid4().hex, nixl_agent_config(enable_prog_thread=False))
            name = self._agent.add_remote_agent(router.metadata)
            self._peer = name.decode() if isinstance(name, bytes) else name
            self._board = router.board
            if self._board is not None:
                # The source memory must be registered and must not move.
                self._buffer = (ctypes.c_char * RECORD_BYTES)()
                self._from = ctypes.addressof(self._buffer)
                self._registered = self._agent.register_memory([(self._from, RECORD_BYTES, 0, "")], "DRAM")
        except Exception as e:  # the bindings raise what they like
            raise Dead(f"cannot reach the router's agent (its NIXL is {router.version or 'unknown'}): {e}") from e

    def send(self, line: bytes) -> bool:
        try:
            self._agent.send_notif(self._peer, notif_msg=line)
        except Exception as e:
            raise Dead(f"notification refused: {e}") from e
        self._until, self._settle = time.monotonic() + self._settle, self.SETTLE
        return True

    def record(self, slot: CompletionSlot, record: bytes) -> bool:
        if self._board is None or slot.index >= self._board.slots or slot.board != self._board.id:
            return self.send(message(slot, record))
        ctypes.memmove(self._from, record, RECORD_BYTES)
        agent, to = self._agent, self._board.address + slot.index * RECORD_BYTES
        try:
            handle = agent.initialize_xfer(
                "WRITE", agent.get_xfer_descs([(self._from, RECORD_BYTES, 0)], "DRAM"), agent.get_xfer_descs([(to, RECORD_BYTES, 0)], "DRAM"), self._peer
            )
            try:
                state, deadline = agent.transfer(handle), time.monotonic() + self.WRITE
                while state == "PROC" and time.monotonic() < deadline:
                    time.sleep(20e-6)
                    state = agent.check_xfer_state(handle)
            finally:
                agent.release_xfer_handle(handle)
        except Exception as e:
            raise Dead(f"write refused: {e}") from e
        if state != "DONE":
            raise Dead(f"a write of {RECORD_BYTES} bytes ended as {state}")
        return True

    def idle(self) -> float:
        """Makes progress; the seconds after which it is to be called again."""
        try:
            self._agent.get_new_notifs()
        except Exception as e:
            raise Dead(f"no progress: {e}") from e
        return 0.001 if time.monotonic() < self._until else self.SLOW

    def close(self) -> None:
        try:
            self._agent.remove_remote_agent(self._peer)
        except Exception:
            pass
        self._agent = None  # its end waits for nothing


class UcxChannel:
    """Active messages, by the libucp of this process or of a wheel. Only a message
    under the router's secret is heard."""

    name = "ucx"
    SLOW = 0.5  # seconds between looks whether the router is still there

    def __init__(self, router: Ucx):
        from . import ucx

        self._error = ucx.UcxError
        try:
            self._sender = ucx.Sender(router.address, router.version, router.secret.encode())
        except (ucx.UcxError, ValueError, IndexError) as e:
            raise Dead(f"cannot reach the router's UCX {router.version}: {e}") from e

    def send(self, line: bytes) -> bool:
        try:
            self._sender.send(line)
        except self._error as e:
            raise Dead(str(e)) from e
        return True

    def record(self, slot: CompletionSlot, record: bytes) -> bool:
        return self.send(message(slot, record))

    def idle(self) -> float:
        try:
            self._sender.progress()
        except self._error as e:
            raise Dead(str(e)) from e
        return self.SLOW

    def close(self) -> None:
        self._sender.close()


def open_channel(kind: str, endpoint, log) -> Optional[object]:
    """The best channel of endpoint that kind allows, or None, with the reasons logged."""
    if kind in ("auto", "nixl") and endpoint.nixl:
        try:
            return NixlChannel(endpoint.nixl)
        except Dead as e:
            log(f"NIXL to the router is off: {e}")
    if kind in ("auto", "ucx") and endpoint.ucx:
        try:
            return UcxChannel(endpoint.ucx)
        except Dead as e:
            log(f"UCX to the router is off: {e}")
    if kind in ("auto", "zmq") and endpoint.zmq:
        try:
            return ZmqChannel(endpoint.zmq)
        except Exception as e:
            log(f"ZMQ to the router at {endpoint.zmq} is off: {e}")
    return None
