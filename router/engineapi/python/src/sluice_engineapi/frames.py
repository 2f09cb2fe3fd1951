"""Frames and their payloads, as docs/wire.md defines them."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Iterator

import msgpack

from .errors import ProtocolError

PROTOCOL = "sluice-routed"
VERSION = 1
MAX_ITEM = 64 << 20  # limit of one item, in bytes
MAX_SMALL = 64 << 10  # limit of any other payload; the router's are far smaller
MAX_PING = 64
MAX_WINDOW = 1 << 30
MAX_STREAM = (1 << 32) - 1


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    ITEM = 4
    END = 5
    CREDIT = 6
    STOP = 7
    KILL = 8
    PING = 9
    PONG = 10
    GOAWAY = 11
    ERROR = 12


_HEADER = struct.Struct(">IBI")
_CREDIT = struct.Struct(">I")
_KINDS = {int(k): k for k in Kind}


def frame(kind: Kind, stream: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload), kind, stream) + payload


def credit(stream: int, count: int) -> bytes:
    return frame(Kind.CREDIT, stream, _CREDIT.pack(count))


def hello(token: str | None, key: str | None, window: int, agent: str) -> bytes:
    members: dict[str, Any] = {"protocol": PROTOCOL, "version": VERSION, "oldest": VERSION, "window": window, "agent": agent}
    if token:
        members["token"] = token
    if key:
        members["key"] = key
    return frame(Kind.HELLO, 0, pack(members))


class Parser:
    """Splits received bytes into frames. It holds at most one frame."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, int, bytes]]:
        """Returns the frames that data completes. Raises ProtocolError for an invalid one."""
        held = self._held
        held += data
        at = 0
        try:
            while len(held) - at >= _HEADER.size:
                size, number, stream = _HEADER.unpack_from(held, at)
                kind = _KINDS.get(number)
                if kind is None:
                    raise ProtocolError(f"a frame of kind {number}; want 1 to {len(_KINDS)}", "protocol")
                most = MAX_ITEM if kind is Kind.ITEM else MAX_PING if kind in (Kind.PING, Kind.PONG) else MAX_SMALL
                if size > most:
                    raise ProtocolError(f"a frame {kind.name} of {size} bytes; want at most {most}", "too_large")
                end = at + _HEADER.size + size
                if len(held) < end:
                    break
                payload = bytes(held[at + _HEADER.size : end])
                at = end
                yield kind, stream, payload
        finally:
            del held[:at]


def pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack(payload: bytes) -> Any:
    """Decodes one msgpack value. Raises ValueError if it is invalid."""
    try:
        return msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except ValueError:  # the base class of most of msgpack's errors
        raise
    except (msgpack.exceptions.UnpackException, TypeError, RecursionError) as e:
        raise ValueError(f"{type(e).__name__}: {e}") from e


def reason(payload: bytes) -> tuple[str, str] | None:
    """Decodes the {code, message} of END, GOAWAY and ERROR; None for an empty payload."""
    if not payload:
        return None
    try:
        members = unpack(payload)
    except ValueError as e:
        return "protocol", f"an error that cannot be read: {e}"
    if not isinstance(members, dict):
        return "protocol", f"an error that is a {type(members).__name__}; want a map"
    return str(members.get("code", "internal")), str(members.get("message", ""))
