"""What can go wrong beside an error item, which is no exception but an answer."""

from __future__ import annotations


class RoutedError(Exception):
    """Every error of this package. code is one of docs/wire.md, or empty."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.code = code
        self.message = message


class CannotConnect(RoutedError):
    """No connection within the time for it, or the router would not have us."""


class ConnectionLost(RoutedError):
    """The connection ended under a request, of which more than was read may have run."""


class ProtocolError(ConnectionLost):
    """The other end sent what docs/wire.md does not allow; the connection is closed."""


class StreamFailed(RoutedError):
    """The router ended one request with a code: client_stalled, internal, …"""


class Refused(StreamFailed):
    """The router took the request not on; nothing was done, it may be sent again."""


class Killed(StreamFailed):
    """The caller killed the request."""


class DeadlineExceeded(RoutedError, TimeoutError):
    """The context's deadline is over, and no item could say so: the request was not sent,
    what had come was not read, or the router fell silent. Else it is an error item of
    code 504."""


def again(error: RoutedError) -> RoutedError:
    """A copy to raise: one reason may end many requests, each with its own traceback."""
    return type(error)(error.message, error.code)


REFUSALS = frozenset({"too_many_streams", "memory_budget", "draining"})


def stream_error(code: str, message: str) -> RoutedError:
    """The exception for the {code, message} of an END frame."""
    if code in REFUSALS:
        return Refused(message, code)
    if code == "killed":
        return Killed(message, code)
    if code == "deadline":
        return DeadlineExceeded(message, code)
    return StreamFailed(message, code)
