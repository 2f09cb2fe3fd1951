#!/usr/bin/env python3
"""Writes router/tokenize/chatinput/testdata/vllm.jsonl: what vLLM's own code makes of
random request bodies, and of some fixed ones, before it renders a chat template.

usage: oracle.py [CASES] >vllm.jsonl

Run it with the Python of an installation of vLLM 0.32, such as the one that
scripts/e2e-vllm.sh makes (~/.cache/sluice/vllm-0.32/venv/bin/python). It needs no
model: the conversion does not depend on one, except for the settings of a case. A
line has api, body (a string), parts, developer, merge, disabled, defaults and want;
want is null where the server refuses the body, or, with exact false, where the
messages alone do not determine the prompt; fixed is true for a fixed body."""
import json
import sys
from types import SimpleNamespace

from bodies import APIS, Generator
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers import merge_kwargs
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _consolidate_system_messages, _convert_developer_to_system

# The server always has this default (--cohere-format), so that a null of a request never reaches a template.
DEFAULTS = {"cohere_format": "cmd4"}
CONFIG = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False, max_model_len=1 << 20, hf_config=SimpleNamespace(model_type="llama"))


# Bodies as text, since some have a member twice: the last value counts.
FIXED = [
    ("responses", '{"input":[{"role":"user","content":"hi","name":"bob"}]}'),
    ("responses", '{"input":[{"role":"user","content":"hi","name":5}]}'),
    ("responses", '{"input":[{"role":"user","content":"hi","name":"a","name":null}]}'),
    ("responses", '{"input":[{"role":"user","content":"hi","task":"t"}]}'),
    ("responses", '{"input":[{"role":"user","content":"hi","tools":[{"a":1}],"channel":"c","reasoning":"r"}]}'),
    ("responses", '{"instructions":"i","input":[{"type":"message","role":"system","content":[{"type":"input_text","text":"a"}],"name":"bob","status":"completed"}]}'),
    ("responses", '{"input":[{"type":"message","role":"assistant","content":"hi","name":"bob"}]}'),
    ("responses", '{"input":[{"role":"developer","content":"hi","name":"b"},{"role":"user","content":"hi"}]}'),
    ("responses", '{"input":[{"role":"user","content":"hi"},{"role":"developer","content":"hi","name":"b"}]}'),
    ("responses", '{"input":[{"type":"message","role":"developer","content":"hi","tools":[{"a":1}]}]}'),
    ("responses", '{"input":[{"type":"message","role":"developer","content":"hi","tools":null}]}'),
    ("responses", '{"input":[{"role":"user","content":"u"},{"type":"function_call_output","call_id":"c","output":"x","name":"n"}]}'),
    ("responses", '{"input":[{"type":null,"role":"user","content":"hi"}]}'),
    ("responses", '{"input":[{"type":null,"id":"x","role":"user","content":"hi"}]}'),
    ("responses", '{"input":[{"type":null,"id":"x","role":"assistant","content":[{"type":"output_text","text":"hi"}],"status":[1]}]}'),
    ("responses", '{"input":[{"type":null,"id":5,"role":"user","content":"hi"}]}'),
    ("responses", '{"input":[{"id":"x","role":"user","content":null}]}'),
    ("responses", '{"input":[{"id":"x","role":"user","content":[{"type":"text","text":"hi"}]}]}'),
    ("responses", '{"input":[{"id":"x","role":"tool","content":"hi","tool_call_id":"c"}]}'),
    ("responses", '{"input":[{"type":"message","id":"x","role":"user","content":null}]}'),
    ("responses", '{"input":[{"id":"x"}]}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"enable_thinking":false,"enable_thinking":null}}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"enable_thinking":false,"x":[1],"enable_thinking":"auto"}}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"enable_thinking":null,"enable_thinking":false}}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"x":1,"\\u0078":null,"y":null,"y":2}}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"x":"\\u0061uto","enable_thinking":"aut\\u006f"}}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":false,"enable_thinking":null}}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"documents":"\\u0061uto","tools":"aut\\u006f","tokenize":"\\u0061uto"}}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"documents":[{"a":5,"a":"x"}]}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"documents":[{"a":"y","b":"c","a":"x"}]}'),
    ("chat", '{"messages":[{"role":"user","content":"hi"}],"documents":[{"a":"y","a":null}]}'),
]


class NotExact(Exception):
    """The prompt is not, or not only, what the messages say."""


def conversation(messages, params, case, want):
    """As HfRenderer.render_messages and safe_apply_chat_template."""
    conv, _, _ = parse_chat_messages(messages, CONFIG, "openai" if case["parts"] else "string")
    if any(m["role"] == "developer" for m in conv) and not case["developer"]:
        conv = _consolidate_system_messages(_convert_developer_to_system(conv))
    conv[0]  # transformers reads it
    kwargs = params.get_apply_chat_template_kwargs()
    want["tokenize"] = bool(kwargs.pop("tokenize", False))
    for name in ("return_dict", "chat_template", *DEFAULTS):
        kwargs.pop(name, None)
    chat = want["input"] = {"messages": conv}
    if (tools := kwargs.pop("tools", None)) is not None:
        chat["tools"] = tools
    if (documents := kwargs.pop("documents", None)) is not None:
        chat["documents"] = documents
    for name in ("add_generation_prompt", "continue_final_message"):
        chat[name] = kwargs.pop(name)
    if chat["add_generation_prompt"] and chat["continue_final_message"]:
        raise NotExact("transformers refuses both")
    chat["chat_template_kwargs"] = dict(sorted(kwargs.items()))


def chat(request, case, want):
    tools = None if request.tools is None else [t.model_dump() for t in request.tools]
    params = request.build_chat_params(None, "auto").with_defaults(merge_kwargs(DEFAULTS | case["defaults"], dict(tools=tools, tokenize=False)))
    conversation(request.messages, params, case, want)


def convert(case):
    body = json.loads(case["body"])
    want = {"tokenize": False}
    if case["api"] == "completions":
        request = CompletionRequest(**body)
        if request.suffix is not None or request.prompt_embeds is not None:
            raise NotExact("not a text")
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if not isinstance(prompts[0], str):
            raise NotExact("ids")
        want["input"] = {"text": prompts[0]}
        want["prompts"] = len(prompts)
    elif case["api"] == "chat":
        request = ChatCompletionRequest(**body)
        if request.chat_template:
            raise NotExact("a template of the request")
        chat(request, case, want)
    elif case["api"] == "messages":
        request = AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest(**body), merge_inline_system=case["merge"], disabled_thinking_effort=case["disabled"]
        )
        chat(request, case, want)
    else:
        request = ResponsesRequest(**body)
        params = request.build_chat_params(None, "auto").with_defaults(DEFAULTS | case["defaults"])
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        params = request.build_chat_params(None, "auto").with_defaults(merge_kwargs(params.chat_template_kwargs, dict(tools=tools, tokenize=False)))
        conversation(messages, params, case, want)
    tok = request.build_tok_params(CONFIG)
    if tok.truncate_prompt_tokens == 0:
        raise NotExact("no prompt")
    if tok.truncate_prompt_tokens is not None:
        want["keep"], want["side"], want["output"] = tok.truncate_prompt_tokens, tok.truncation_side, tok.max_output_tokens != 0
    want["add_special_tokens"] = not want.pop("tokenize") and tok.add_special_tokens
    return want


def plain(o):
    return o.model_dump() if hasattr(o, "model_dump") else list(o)


def show(case):
    try:
        case["want"] = convert(case)
        json.dumps(case["want"], allow_nan=False, default=plain)
    except NotExact:
        case["want"], case["exact"] = None, False
    except Exception:  # whatever it is, the server answers with an error
        case["want"] = None
    print(json.dumps(case, ensure_ascii=False, separators=(",", ":"), default=plain))


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    g = Generator(32)
    for i in range(count):
        api = APIS[i % len(APIS)]
        body = json.dumps(getattr(g, api)(), ensure_ascii=g.r.random() < 0.5)
        case = {"api": api, "body": body, "parts": g.r.random() < 0.4, "developer": g.r.random() < 0.5, "merge": g.r.random() < 0.5, "disabled": g.one("none", "low"), "defaults": g.one({}, {}, {"enable_thinking": True})}
        show(case)
    for api, body in FIXED:
        for developer in (True, False):
            show({"api": api, "body": body, "parts": developer, "developer": developer, "merge": False, "disabled": "none", "defaults": {"enable_thinking": True}, "fixed": True})


main()
