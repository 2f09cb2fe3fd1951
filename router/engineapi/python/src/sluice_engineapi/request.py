"""The request: Dynamo's PreprocessedRequest, as docs/engine-api.md defines it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence, TypedDict

from .frames import pack


class StopConditions(TypedDict, total=False):
    max_tokens: int
    min_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    stop_token_ids_visible: list[int]
    stop_token_ids_hidden: list[int]
    ignore_eos: bool
    max_thinking_tokens: int


class SamplingOptions(TypedDict, total=False):
    n: int
    best_of: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    length_penalty: float
    use_beam_search: bool
    seed: int
    include_stop_str_in_output: bool
    guided_decoding: dict[str, Any]


class OutputOptions(TypedDict, total=False):
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    formatted_prompt: bool
    return_tokens_as_token_ids: bool


class RoutingHints(TypedDict, total=False):
    backend_instance_id: str
    prefill_worker_id: str
    decode_worker_id: str
    dp_rank: int
    prefill_dp_rank: int
    allowed_worker_ids: list[str]
    routing_constraints: dict[str, Any]
    session_id: str
    expected_output_tokens: int
    lora_name: str
    cache_salt: str
    priority: int
    priority_jump: float
    strict_priority: int
    prefill_only: bool


class RouterConfigOverride(TypedDict, total=False):
    overlap_score_weight: float
    router_temperature: float


@dataclass
class Request:
    """A preprocessed request. Members that are None or empty are omitted.

    The option objects (stop_conditions, sampling_options, output_options) may be plain
    mappings with members that have no name here; the router hands them on. Top-level
    members of that kind go into extra (extra_args, mm_processor_kwargs,
    multi_modal_data, …). The others are the router's own: it refuses what it does not
    know in them.
    """

    token_ids: Sequence[int]
    model: str = ""
    stop_conditions: StopConditions | Mapping[str, Any] | None = None
    sampling_options: SamplingOptions | Mapping[str, Any] | None = None
    output_options: OutputOptions | Mapping[str, Any] | None = None
    eos_token_ids: Sequence[int] = ()
    annotations: Sequence[str] = ()
    routing: RoutingHints | Mapping[str, Any] | None = None
    router_config_override: RouterConfigOverride | Mapping[str, Any] | None = None
    prefill_result: Mapping[str, Any] | None = None
    bootstrap_info: Mapping[str, Any] | None = None
    mm_routing_info: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def members(self) -> dict[str, Any]:
        """Returns the request as a map. Raises ValueError if extra has the name of a field."""
        out: dict[str, Any] = {"token_ids": list(self.token_ids)}
        for name in _SEQUENCES:
            if values := list(getattr(self, name)):
                out[name] = values
        for name in _PLAIN:
            if value := getattr(self, name):
                out[name] = dict(value) if isinstance(value, Mapping) else value
        for name, value in self.extra.items():
            if name in _KNOWN:
                raise ValueError(f"request: extra[{name!r}] has a field of its own; set that one")
            out[name] = value
        return out


_SEQUENCES = ("eos_token_ids", "annotations")
_PLAIN = (
    "model",
    "stop_conditions",
    "sampling_options",
    "output_options",
    "routing",
    "router_config_override",
    "prefill_result",
    "bootstrap_info",
    "mm_routing_info",
)
_KNOWN = {"token_ids", "context", *_SEQUENCES, *_PLAIN}


def encode(request: Request | Mapping[str, Any], context: Mapping[str, Any]) -> bytes:
    """Encodes the payload of a REQUEST frame. Raises ValueError for a value that msgpack cannot encode."""
    members = request.members() if isinstance(request, Request) else dict(request)
    members["context"] = {**(members.get("context") or {}), **context}
    try:
        return pack(members)
    except (TypeError, ValueError, OverflowError) as e:
        for name, value in members.items():  # find the member
            try:
                pack(value)
            except (TypeError, ValueError, OverflowError) as why:
                raise ValueError(f"request: cannot write {name!r}: {why}") from why
        raise ValueError(f"request: cannot be written: {e}") from e
