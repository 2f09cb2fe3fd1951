# SPDX-License-Identifier: Apache-2.0
"""How a router can be notified of transfers, as it describes it.

``GET {router}/v1/connector`` with ``Authorization: Bearer TOKEN`` answers::

    {"version": 1, "epoch": "5f0c…",             another after each start of the router
     "zmq": {"endpoint": "tcp://10.0.0.1:8091"},  null where there is none
     "ucx": {"address": "<base64>", "version": "1.23", "secret": "…"},
     "nixl": {"agent": "sluice-5f0c…", "metadata": "<base64>", "version": "1.5.1",
              "board": {"id": 2, "address": 139…, "slots": 65536, "slot_bytes": 64, "device": 0}}}

The metadata lets its holder write into the board, and the secret report, so
neither is ever logged.
"""

import base64
import http.client
import json
import urllib.request
from typing import NamedTuple, Optional

TIMEOUT = 3.0  # seconds
MAX_ANSWER = 1 << 20


class Board(NamedTuple):
    address: int
    slots: int
    id: int = 0


class Nixl(NamedTuple):
    agent: str
    metadata: bytes
    version: str
    board: Optional[Board] = None


class Ucx(NamedTuple):
    address: bytes
    version: str
    secret: str


class Endpoint(NamedTuple):
    epoch: str
    zmq: Optional[str]
    nixl: Optional[Nixl]
    ucx: Optional[Ucx] = None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args):
        return None


def fetch(router: str, token: Optional[str]) -> Endpoint:
    """Asks the router; OSError or ValueError say why it could not be had."""
    request = urllib.request.Request(router.rstrip("/") + "/v1/connector")
    if token:
        request.add_header("Authorization", "Bearer " + token)
    # No proxy: the router is on the engines' own network. No redirect: it would
    # carry the token elsewhere.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            body = answer.read(MAX_ANSWER + 1)
    except http.client.HTTPException as e:  # another server listens there, or the answer was truncated
        raise OSError(f"no HTTP answer: {e!r}") from e
    if len(body) > MAX_ANSWER:
        raise ValueError("the router's answer is too long")
    return parse(body)


def parse(body: bytes) -> Endpoint:
    try:
        doc = json.loads(body)
        version = doc["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("the answer is not a connector document of a Sluice router") from None
    if version != 1:
        raise ValueError(f"the router speaks version {version!r} of the connector document; this connector knows 1")
    try:
        zmq, nixl = doc.get("zmq"), doc.get("nixl")
        if nixl:
            board = nixl.get("board")
            if board and board.get("slot_bytes") == 64 and board.get("device", 0) == 0:
                board = Board(int(board["address"]), int(board["slots"]), int(board.get("id", 0)))
            else:
                board = None  # of a kind that we cannot write to: notifications will do
            nixl = Nixl(nixl["agent"], base64.b64decode(nixl["metadata"]), str(nixl.get("version", "")), board)
        ucx = doc.get("ucx")
        if ucx:
            ucx = Ucx(base64.b64decode(ucx["address"]), str(ucx["version"]), str(ucx["secret"]))
        return Endpoint(str(doc.get("epoch", "")), zmq["endpoint"] if zmq else None, nixl or None, ucx or None)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"the connector document lacks {e}") from None
