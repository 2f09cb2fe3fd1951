"""Exceptions. The failure of a request that the router reports is an error item, not an exception."""

from __future__ import annotations


class EngineAPIError(Exception):
    """Base class of the exceptions. code is a code of docs/wire.md, or empty."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.code = code
        self.message = message


class CannotConnect(EngineAPIError):
    """No connection within connect_timeout, or the router rejected it."""


class ConnectionLost(EngineAPIError):
    """The connection ended during a request. The engine may have computed more than was read."""


class ProtocolError(ConnectionLost):
    """The router violated the protocol of docs/wire.md; the connection is closed."""


class StreamFailed(EngineAPIError):
    """The router ended one request with a code: client_stalled, internal, …"""


class Refused(StreamFailed):
    """The router rejected the request before doing anything; it may be sent again."""


class Killed(StreamFailed):
    """The caller killed the request."""


class DeadlineExceeded(EngineAPIError, TimeoutError):
    """The context's deadline has passed and no error item reports it, because the request was
    not sent, earlier items were not read, or the router stopped responding. Otherwise the
    router sends an error item with code 504."""


def again(error: EngineAPIError) -> EngineAPIError:
    """Returns a copy to raise, because one error may end many requests, each with its own traceback."""
    return type(error)(error.message, error.code)


REFUSALS = frozenset({"too_many_streams", "memory_budget", "draining"})


def stream_error(code: str, message: str) -> EngineAPIError:
    """Returns the exception for the {code, message} of an END frame."""
    if code in REFUSALS:
        return Refused(message, code)
    if code == "killed":
        return Killed(message, code)
    if code == "deadline":
        return DeadlineExceeded(message, code)
    return StreamFailed(message, code)
