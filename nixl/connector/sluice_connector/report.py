# SPDX-License-Identifier: Apache-2.0
"""What is told of one transfer, and its bytes on every channel.

A report is one line of UTF-8 without a line end, at most MAX_BYTES long, its
ten fields parted by single spaces, the same over NIXL, UCX and ZMQ::

    SLUICE1 EVENT STATUS SLOT NONCE BYTES MICROS PART WORKER REQUEST

    EVENT    recv     a decode engine has, or has not, received a request's KV
             sent     every reader of a prefill engine's blocks is done; they are free
             expired  nobody read them before the lease ended; they are free
    STATUS   ok or failed
    SLOT     of the router's completion board, or - where none was handed out
    NONCE    16 hexadecimal digits that came with the slot, or -
    BYTES    moved, 0 where the engine does not say
    MICROS   the transfer took, likewise
    PART     DPRANK/TPRANK/TPSIZE: a request has ended when TPSIZE parts have
    WORKER   the name given to this engine in its configuration, else its engine id
    REQUEST  the engine's own id of the request, which holds the X-Request-Id it came with
"""

from typing import NamedTuple

VERSION = "SLUICE1"
MAX_BYTES = 512

RECV, SENT, EXPIRED = "recv", "sent", "expired"
OK, FAILED = "ok", "failed"


class Report(NamedTuple):
    event: str
    request: str
    status: str = OK
    bytes: int = 0
    micros: int = 0
    slot: int = -1
    nonce: int = 0


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
    slot = "-" if report.slot < 0 else str(report.slot)
    nonce = "-" if report.slot < 0 else format(report.nonce, "016x")
    line = (
        f"{VERSION} {report.event} {report.status} {slot} {nonce} {report.bytes} {report.micros} "
        f"{origin.dp_rank}/{origin.tp_rank}/{origin.tp_size} {worker} {report.request}"
    ).encode()
    if len(line) > MAX_BYTES:
        raise ValueError(f"a report of {len(line)} bytes; at most {MAX_BYTES} fit")
    return line


def hand_out(params) -> tuple:
    """The (slot, nonce) that the router put into kv_transfer_params, or (-1, 0).

    It is the member ``sluice``: ``{"slot": 17, "nonce": "00c0ffee00c0ffee"}``.
    Whatever else stands there is no error: the report then goes without.
    """
    try:
        given = params["sluice"]
        slot, nonce = int(given["slot"]), int(given["nonce"], 16)
    except (KeyError, TypeError, ValueError):
        return -1, 0
    if slot < 0 or not 0 <= nonce < 1 << 64:
        return -1, 0
    return slot, nonce
