"""The answer's items: Annotated<LLMEngineOutput>, as docs/engine-api.md defines them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .frames import unpack


@dataclass
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | None = None  # None: not reported


@dataclass
class Output:
    """One piece of an answer. token_ids never repeat earlier ones."""

    token_ids: list[int]
    index: int = 0  # of the choice
    finish_reason: str | None = None  # None: the choice continues
    log_probs: list[float | None] | None = None  # one for each token
    top_logprobs: list[list[dict[str, Any]]] | None = None
    stop_reason: Any = None
    extra_args: Any = None
    completion_usage: Usage | None = None  # with the answer's last item
    extra: dict[str, Any] = field(default_factory=dict)  # members without a field here


@dataclass
class Failure:
    """The failure of a request, in OpenAI's error shape."""

    message: str
    type: str = ""
    param: str | None = None  # the invalid field of the request
    code: int = 0  # as an HTTP status


class Item:
    """One item of an answer: data, comments, or an error."""

    __slots__ = ("_comments", "_data", "_failure", "extra")

    def __init__(
        self,
        data: Output | None = None,
        comments: list[str] | None = None,
        failure: Failure | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._data = data
        self._comments = comments or []
        self._failure = failure
        self.extra = extra or {}  # members without a field here

    def is_error(self) -> bool:
        return self._failure is not None

    def data(self) -> Output | None:
        return self._data

    def comments(self) -> list[str]:
        """Returns the annotations, or the message of an error item."""
        return self._comments

    def error(self) -> Failure | None:
        return self._failure

    def __repr__(self) -> str:
        return f"Item(data={self._data!r}, comments={self._comments!r}, error={self._failure!r})"


def decode(payload: bytes) -> Item:
    """Decodes the item of an ITEM frame. Raises a ValueError that names the invalid member."""
    members = _map(unpack(payload), "the item")
    raw = members.pop("data", None)
    data = None if raw is None else _output(_map(raw, "data"))
    comments = members.pop("comment", None)
    if comments is not None and not (isinstance(comments, list) and all(isinstance(c, str) for c in comments)):
        raise ValueError(f"comment is {comments!r:.80}; want strings")
    failure = None
    raw = members.pop("error", None)
    if members.pop("event", None) == "error" or raw is not None:
        f = _map({} if raw is None else raw, "error")
        code = f.get("code")
        failure = Failure(
            message=str(f.get("message") or "the router does not say what went wrong"),
            type=str(f.get("type") or ""),
            param=f.get("param"),
            code=code if isinstance(code, int) else 0,
        )
    return Item(data, comments, failure, members)


def _map(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}; want a map")
    return value


def _output(m: dict[str, Any]) -> Output:
    ids = m.pop("token_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"data.token_ids is {ids!r:.80}; want integers")
    finish = m.pop("finish_reason", None)
    if finish is not None and not isinstance(finish, str):
        raise ValueError(f"data.finish_reason is {finish!r:.80}; want a string or nothing")
    index = m.pop("index", 0)
    if type(index) is not int:
        raise ValueError(f"data.index is {index!r:.80}; want an integer")
    usage = m.pop("completion_usage", None)
    return Output(
        token_ids=ids,
        index=index,
        finish_reason=finish,
        log_probs=m.pop("log_probs", None),
        top_logprobs=m.pop("top_logprobs", None),
        stop_reason=m.pop("stop_reason", None),
        extra_args=m.pop("extra_args", None),
        completion_usage=None if usage is None else _usage(_map(usage, "data.completion_usage")),
        extra=m,
    )


def _usage(m: dict[str, Any]) -> Usage:
    details = m.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, completion, total = m.get("prompt_tokens", 0), m.get("completion_tokens", 0), m.get("total_tokens", 0)
    if not all(type(n) is int for n in (prompt, completion, total)):
        raise ValueError(f"data.completion_usage is {m!r:.80}; want integers")
    return Usage(prompt, completion, total, cached)
