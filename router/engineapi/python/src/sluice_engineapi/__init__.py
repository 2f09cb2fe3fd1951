"""Client of a Sluice router's engine API, for preprocessors that render and tokenize requests.

EngineClient is the main type: it holds one connection to a router and multiplexes
requests on it. The frames are those of docs/wire.md, requests and items those of
docs/engine-api.md. The package starts no thread, and no task that outlives a connection
attempt.
"""

from .context import Context
from .engine import Answer, EngineClient
from .errors import (
    CannotConnect,
    ConnectionLost,
    DeadlineExceeded,
    EngineAPIError,
    Killed,
    ProtocolError,
    Refused,
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
    "EngineAPIError",
    "EngineClient",
    "Failure",
    "Item",
    "Killed",
    "Output",
    "OutputOptions",
    "ProtocolError",
    "Refused",
    "Request",
    "RouterConfigOverride",
    "RoutingHints",
    "SamplingOptions",
    "StopConditions",
    "StreamFailed",
    "Usage",
]
