"""A Sluice router as one engine, for preprocessors that render and tokenize themselves.

RoutedEngine is the main type: it holds one connection to a router and multiplexes
requests on it. The frames are those of docs/wire.md, requests and items those of
docs/engine-api.md. The package starts no thread, and no task that outlives a connection
attempt.
"""

from .context import Context
from .engine import Answer, RoutedEngine
from .errors import (
    CannotConnect,
    ConnectionLost,
    DeadlineExceeded,
    Killed,
    ProtocolError,
    Refused,
    RoutedError,
    StreamFailed,
)
from .item import Failure, Item, Output, Usage
from .request import (
    OutputOptions,
    Request,
    RouterConfigOverride,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)

__all__ = [
    "Answer",
    "CannotConnect",
    "ConnectionLost",
    "Context",
    "DeadlineExceeded",
    "Failure",
    "Item",
    "Killed",
    "Output",
    "OutputOptions",
    "ProtocolError",
    "Refused",
    "Request",
    "RoutedEngine",
    "RoutedError",
    "RouterConfigOverride",
    "RoutingHints",
    "SamplingOptions",
    "StopConditions",
    "StreamFailed",
    "Usage",
]
