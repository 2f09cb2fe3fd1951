# SPDX-License-Identifier: Apache-2.0
"""Where the router is: kv_connector_extra_config's member ``sluice``, or the environment.

    router   SLUICE_ROUTER   http://HOST:PORT of its registration listener, which tells the rest
    zmq      SLUICE_ZMQ      tcp://HOST:PORT of its PULL socket: instead of asking the router
    worker   SLUICE_WORKER   this engine's name in the router's configuration [the engine id]
    channel  SLUICE_CHANNEL  auto, nixl, ucx, zmq or off [auto: the best that both sides have]
    token_file  SLUICE_TOKEN_FILE  a file with the registration token (SLUICE_TOKEN: the token itself)

The token is never taken from the connector's configuration, which vLLM logs.
"""

import os
from typing import NamedTuple, Optional
from urllib.parse import urlsplit

CHANNELS = ("auto", "nixl", "ucx", "zmq", "off")


class Settings(NamedTuple):
    router: Optional[str] = None
    zmq: Optional[str] = None
    worker: Optional[str] = None
    channel: str = "auto"
    token: Optional[str] = None

    @property
    def off(self) -> bool:
        return self.channel == "off" or not (self.router or self.zmq)


def read(extra, environ=os.environ) -> Settings:
    """Reads the settings; ValueError names the member and what it may be."""
    if extra is None:
        extra = {}
    if not isinstance(extra, dict):
        raise ValueError(f'"sluice" must be an object, not {extra!r}')
    unknown = set(extra) - {"router", "zmq", "worker", "channel", "token_file"}
    if unknown:
        raise ValueError(f'"sluice" has an unknown member {sorted(unknown)[0]!r}; known: router, zmq, worker, channel, token_file')

    def pick(name):
        value = extra.get(name) or environ.get("SLUICE_" + name.upper()) or None
        if value is not None and not isinstance(value, str):
            raise ValueError(f'"sluice.{name}" must be a string, not {value!r}')
        return value

    router, zmq, channel = pick("router"), pick("zmq"), pick("channel") or "auto"
    if router is not None and urlsplit(router).scheme not in ("http", "https"):
        raise ValueError(f'"sluice.router" is {router!r}; want http://HOST:PORT or https://HOST:PORT')
    if zmq is not None and urlsplit(zmq).scheme not in ("tcp", "ipc"):
        raise ValueError(f'"sluice.zmq" is {zmq!r}; want tcp://HOST:PORT')
    if channel not in CHANNELS:
        raise ValueError(f'"sluice.channel" is {channel!r}; want one of {", ".join(CHANNELS)}')
    token, named = environ.get("SLUICE_TOKEN"), "SLUICE_TOKEN"
    path = pick("token_file")
    if path:
        named = f"token_file {path}"
        with open(path, encoding="utf-8", errors="replace") as file:
            token = file.read()
    token = (token or "").strip() or None
    # http.client would refuse it too, in words that hold all of it, which are logged.
    if token and not all("!" <= c <= "~" for c in token):
        raise ValueError(f"the token of {named} has white space or what is not ASCII within it; want one word of visible ASCII")
    return Settings(router, zmq, pick("worker"), channel, token)
