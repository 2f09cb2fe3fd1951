# SPDX-License-Identifier: Apache-2.0
"""The report of one transfer, and its bytes on every channel.

A report is one line of UTF-8 without a line end, at most MAX_BYTES long, its
ten fields separated by single spaces, the same over NIXL, UCX and ZMQ::

    SLUICE1 EVENT STATUS SLOT NONCE BYTES MICROS PART WORKER REQUEST

    EVENT    recv     a decode engine has, or has not, received a request's KV
             sent     every reader of a prefill engine's blocks is done; they are free
             expired  nobody read them before the lease ended; they are free
    STATUS   ok or failed
    SLOT     of the router's completion board, or - without one
    NONCE    16 hexadecimal digits that came with it, or -
    BYTES    moved, 0 where the engine does not say
    MICROS   the transfer took, likewise
    PART     DPRANK/TPRANK/TPSIZE: a request has ended when TPSIZE parts have
    WORKER   the name given to this engine in its configuration, else its engine id
    REQUEST  the engine's own id of the request, which holds the X-Request-Id it came with

A request that has a slot of the router's completion board, and that one
process alone receives, is reported by a record of 64 bytes instead (nixl/record.go):
written into the slot over NIXL, or behind "SLB1" and the slot's number elsewhere.
"""

import struct
from typing import NamedTuple, Optional

VERSION = "SLUICE1"
MAX_BYTES = 512

RECV, SENT, EXPIRED = "recv", "sent", "expired"
OK, FAILED = "ok", "failed"


class CompletionSlot(NamedTuple):
    """A slot of the completion board that the router assigned to one request."""

    index: int
    sequence: int
    nonce: int
    request: int
    board: int = 0  # which of the router's boards; 0 from a router that has one


class Report(NamedTuple):
    event: str
    request: str
    status: str = OK
    bytes: int = 0
    micros: int = 0
    slot: Optional[CompletionSlot] = None


class Origin(NamedTuple):
    """Who reports: the same for every report of a process."""

    worker: str
    dp_rank: int = 0
    tp_rank: int = 0
    tp_size: int = 1


def encode(report: Report, origin: Origin) -> bytes:
    """The bytes of a report; ValueError where a field does not fit its place."""
    if not report.request or any(c.isspace() for c in report.request):
        raise ValueError(f"request id {report.request!r} is empty or has white space")
    worker = origin.worker or "-"
    if any(c.isspace() for c in worker):
        raise ValueError(f"worker name {worker!r} has white space")
    s = report.slot
    slot = "-" if s is None else str(s.index)
    nonce = "-" if s is None else format(s.nonce, "016x")
    line = (
        f"{VERSION} {report.event} {report.status} {slot} {nonce} {report.bytes} {report.micros} "
        f"{origin.dp_rank}/{origin.tp_rank}/{origin.tp_size} {worker} {report.request}"
    ).encode()
    if len(line) > MAX_BYTES:
        raise ValueError(f"a report of {len(line)} bytes; at most {MAX_BYTES} fit")
    return line


RECORD_VERSION = 0x01424C53
RECORD_BYTES = 64


def record(report: Report, origin: Origin) -> Optional[bytes]:
    """The board's record of a report, None where its line is what must be sent."""
    t = report.slot
    if t is None or origin.tp_size != 1:
        return None
    head = RECORD_VERSION | (0 if report.status == OK else 1) << 32
    words = [head, t.nonce, t.request, max(report.bytes, 0), max(report.micros, 0), origin.dp_rank << 32, 0, t.sequence]
    for i in (0, 1, 2, 3, 4, 5, 7):
        words[6] ^= words[i]
    return struct.pack("<8Q", *words)


def message(slot: CompletionSlot, its_record: bytes) -> bytes:
    """A record as a message."""
    return b"SLB1" + struct.pack("<I", slot.index) + its_record


def slot_of(params) -> Optional[CompletionSlot]:
    """The slot that the router put into kv_transfer_params, if any.

    It is the member ``sluice``: ``{"slot": 17, "sequence": "5", "nonce":
    "00c0ffee00c0ffee", "request": "1f", "board": 2}``, those in quotes hexadecimal. Whatever
    else stands there is no error: the report then goes by its line.
    """
    try:
        given = params["sluice"]
        t = CompletionSlot(int(given["slot"]), int(given["sequence"], 16), int(given["nonce"], 16), int(given["request"], 16), int(given.get("board", 0)))
    except (KeyError, TypeError, ValueError, ArithmeticError):  # JSON's 1e999 is infinity here, which is not an integer
        return None
    if not 0 <= t.index < 1 << 20 or any(not 0 <= n < 1 << 64 for n in t[1:]):
        return None
    return t
