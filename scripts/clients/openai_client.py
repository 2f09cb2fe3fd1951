"""Tests an OpenAI-compatible server with the official Python client.

usage: openai_client.py BASE_URL [--model NAME] [--skip GROUP,GROUP]

The checks concern structure, determinism and headers, never the meaning of the text, so
that they apply to simulated and real engines. Groups: chat, completions, many, tools,
embeddings, responses, headers, errors, abort.
"""

import argparse
import concurrent.futures
import json
import sys
import time
import traceback

import openai

PROMPT = "Describe a lighthouse keeper's day, hour by hour, from the first light to the last lamp."
MESSAGES = [
    {"role": "system", "content": "You answer in plain words."},
    {"role": "user", "content": PROMPT + " Zwölf Boxkämpfer 🥊 jagen “Viktor” \\ quer\tüber."},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather_at",
            "description": "The weather at a place",
            "parameters": {
                "type": "object",
                "properties": {"celsius": {"type": "boolean"}},
                "required": ["celsius"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "tide_at",
            "parameters": {
                "type": "object",
                "properties": {"high": {"type": "boolean"}},
                "required": ["high"],
                "additionalProperties": False,
            },
        },
    },
]
FINISH = {"stop", "length", "tool_calls"}
CHECKS = []


def check(group):
    def keep(function):
        CHECKS.append((group, function))
        return function

    return keep


def expect(condition, *seen):
    if not condition:
        raise AssertionError("seen: " + ", ".join(repr(s) for s in seen))


def usage_adds_up(usage, limit):
    expect(usage.prompt_tokens > 0, usage)
    expect(0 < usage.completion_tokens <= limit, usage)
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)


class Run:
    def __init__(self, base_url, model):
        # No retries: a retry in the client would hide a wrong answer.
        self.client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
        self.model = model or self.client.models.list().data[0].id

    def chat(self, **more):
        settings = {"model": self.model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
        return self.client.chat.completions.create(**{**settings, **more})

    def completion(self, **more):
        settings = {"model": self.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        return self.client.completions.create(**{**settings, **more})


def collect_chat(stream):
    """Collects a chat stream: texts and finish reasons by choice, and the usage."""
    texts, reasons, usage, ids = {}, {}, None, set()
    for chunk in stream:
        expect(chunk.object == "chat.completion.chunk", chunk.object)
        ids.add(chunk.id)
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            expect(choice.index not in reasons, "a delta after the finish reason", choice)
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    expect(len(ids) == 1, ids)
    return texts, reasons, usage


def collect_completion(stream):
    texts, reasons, usage = {}, {}, None
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


@check("chat")
def models_are_listed(run):
    page = run.client.models.list()
    expect(page.object == "list", page.object)
    expect(run.model in [m.id for m in page.data], page.data)
    expect(all(m.object == "model" for m in page.data), page.data)


@check("chat")
def chat_has_the_right_shape(run):
    answer = run.chat()
    expect(answer.object == "chat.completion", answer.object)
    expect(answer.id.startswith("chatcmpl-"), answer.id)
    expect(answer.model == run.model, answer.model)
    expect([c.index for c in answer.choices] == [0], answer.choices)
    choice = answer.choices[0]
    expect(choice.message.role == "assistant", choice.message)
    expect(choice.message.content, choice.message)
    expect(choice.finish_reason in FINISH, choice.finish_reason)
    usage_adds_up(answer.usage, 24)


@check("chat")
def chat_is_deterministic(run):
    first, second = run.chat(), run.chat()
    expect(first.choices[0].message.content == second.choices[0].message.content, first, second)
    expect(first.id != second.id, first.id)


@check("chat")
def chat_streamed_is_chat_not_streamed(run):
    whole = run.chat()
    texts, reasons, usage = collect_chat(run.chat(stream=True))
    expect(texts == {0: whole.choices[0].message.content}, texts, whole)
    expect(reasons == {0: whole.choices[0].finish_reason}, reasons)
    expect(usage is None, usage)


@check("chat")
def chat_stream_carries_usage_when_asked(run):
    whole = run.chat()
    texts, _, usage = collect_chat(run.chat(stream=True, stream_options={"include_usage": True}))
    expect(texts == {0: whole.choices[0].message.content}, texts, whole)
    usage_adds_up(usage, 24)
    expect(usage.prompt_tokens == whole.usage.prompt_tokens, usage, whole.usage)
    expect(usage.completion_tokens == whole.usage.completion_tokens, usage, whole.usage)


@check("chat")
def chat_arrives_as_it_is_made(run):
    pieces = [c for c in run.chat(stream=True, max_tokens=32) if c.choices and c.choices[0].delta.content]
    expect(len(pieces) > 4, len(pieces))


@check("chat")
def max_completion_tokens_counts(run):
    answer = run.chat(max_tokens=openai.omit, max_completion_tokens=5)
    expect(answer.usage.completion_tokens <= 5, answer.usage)


@check("chat")
def second_turn_follows_the_first(run):
    first = run.chat()
    turn = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}]
    second = run.chat(messages=[*turn, {"role": "user", "content": "And the night?"}])
    expect(second.usage.prompt_tokens > first.usage.prompt_tokens, first.usage, second.usage)


@check("completions")
def completion_has_the_right_shape(run):
    answer = run.completion()
    expect(answer.object == "text_completion", answer.object)
    expect(answer.id.startswith("cmpl-"), answer.id)
    expect([c.index for c in answer.choices] == [0], answer.choices)
    expect(answer.choices[0].text, answer.choices)
    expect(answer.choices[0].finish_reason in FINISH, answer.choices)
    usage_adds_up(answer.usage, 24)
    expect(run.completion().choices[0].text == answer.choices[0].text, answer)


@check("completions")
def completion_streamed_is_completion_not_streamed(run):
    whole = run.completion()
    texts, reasons, usage = collect_completion(run.completion(stream=True, stream_options={"include_usage": True}))
    expect(texts == {0: whole.choices[0].text}, texts, whole)
    expect(reasons == {0: whole.choices[0].finish_reason}, reasons)
    usage_adds_up(usage, 24)


@check("completions")
def token_ids_are_a_prompt(run):
    ids = list(range(100, 180))
    whole = run.completion(prompt=ids)
    expect(whole.usage.prompt_tokens == len(ids), whole.usage)
    texts, _, _ = collect_completion(run.completion(prompt=ids, stream=True))
    expect(texts == {0: whole.choices[0].text}, texts, whole)


@check("many")
def two_choices_at_once(run):
    # An engine can refuse n above 1 at temperature 0; the seed makes the answer repeatable.
    more = {"n": 2, "temperature": 0.8, "seed": 11}
    whole = run.chat(**more)
    expect(sorted(c.index for c in whole.choices) == [0, 1], whole.choices)
    want = {c.index: c.message.content for c in whole.choices}
    again = {c.index: c.message.content for c in run.chat(**more).choices}
    expect(want == again, want, again)
    texts, reasons, _ = collect_chat(run.chat(stream=True, **more))
    expect(texts == want, texts, want)
    expect(sorted(reasons) == [0, 1], reasons)
    whole = run.completion(**more)
    expect(sorted(c.index for c in whole.choices) == [0, 1], whole.choices)
    texts, _, _ = collect_completion(run.completion(stream=True, **more))
    expect(texts == {c.index: c.text for c in whole.choices}, texts, whole.choices)


@check("many")
def many_at_once(run):
    want = [run.chat(messages=[{"role": "user", "content": f"{PROMPT} {i}"}]) for i in range(4)]
    want = [w.choices[0].message.content for w in want]

    def one(i):
        messages = [{"role": "user", "content": f"{PROMPT} {i % 4}"}]
        if i % 2:
            return collect_chat(run.chat(messages=messages, stream=True))[0][0]
        return run.chat(messages=messages).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        got = list(pool.map(one, range(24)))
    expect(got == [want[i % 4] for i in range(24)], got, want)


def tool_calls_are_sound(calls, names):
    expect(calls, calls)
    for call in calls:
        expect(call.type == "function" and call.id, call)
        expect(call.function.name in names, call)
        expect(isinstance(json.loads(call.function.arguments), dict), call)


def streamed_tools(stream):
    """Returns [name, arguments] by tool-call index, and the finish reason."""
    calls, reason = {}, None
    for chunk in stream:
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(delta.index, ["", ""])
                call[0] += delta.function.name or ""
                call[1] += delta.function.arguments or ""
            reason = choice.finish_reason or reason
    return calls, reason


@check("tools")
def a_tool_call_when_one_is_required(run):
    more = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 128}
    whole = run.chat(**more)
    tool_calls_are_sound(whole.choices[0].message.tool_calls, {"weather_at", "tide_at"})
    expect(whole.choices[0].finish_reason == "tool_calls", whole.choices)
    calls, reason = streamed_tools(run.chat(stream=True, **more))
    got = [(c[0], json.loads(c[1])) for _, c in sorted(calls.items())]
    want = [(c.function.name, json.loads(c.function.arguments)) for c in whole.choices[0].message.tool_calls]
    expect(got == want, got, want)
    expect(reason == "tool_calls", reason)


@check("tools")
def the_tool_that_is_named(run):
    named = {"type": "function", "function": {"name": "tide_at"}}
    whole = run.chat(tools=TOOLS, tool_choice=named, max_tokens=128)
    tool_calls_are_sound(whole.choices[0].message.tool_calls, {"tide_at"})
    calls, _ = streamed_tools(run.chat(tools=TOOLS, tool_choice=named, max_tokens=128, stream=True))
    expect([c[0] for c in calls.values()] == ["tide_at"], calls)
    want = json.loads(whole.choices[0].message.tool_calls[0].function.arguments)
    expect(json.loads(calls[min(calls)][1]) == want, calls, want)


@check("tools")
def a_tool_result_goes_back(run):
    first = run.chat(tools=TOOLS, tool_choice="required", max_tokens=128).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"celsius": 11}'}
    call = {"role": "assistant", "content": first.content or "", "tool_calls": [first.tool_calls[0].to_dict()]}
    answer = run.chat(messages=[*MESSAGES, call, result], tools=TOOLS, tool_choice="none")
    expect(answer.choices[0].message.content, answer)


@check("embeddings")
def embeddings_have_the_right_shape(run):
    one = run.client.embeddings.create(model=run.model, input=["first light", "last lamp"])
    expect([d.index for d in one.data] == [0, 1], one.data)
    expect(all(isinstance(x, float) for d in one.data for x in d.embedding), one.data)
    expect(len(one.data[0].embedding) == len(one.data[1].embedding) > 0, one.data)
    expect(one.usage.prompt_tokens > 0, one.usage)
    two = run.client.embeddings.create(model=run.model, input=["first light", "last lamp"])
    expect([d.embedding for d in one.data] == [d.embedding for d in two.data])


@check("responses")
def responses_streamed_and_not(run):
    more = {"model": run.model, "input": PROMPT, "max_output_tokens": 24, "temperature": 0}
    whole = run.client.responses.create(**more)
    expect(whole.object == "response" and whole.output_text, whole)
    text, last = "", None
    for event in run.client.responses.create(stream=True, **more):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event.type
    expect(text == whole.output_text, text, whole.output_text)
    expect(last in ("response.completed", "response.incomplete"), last)


@check("headers")
def request_id_comes_back(run):
    for stream in (False, True):
        name = f"acceptance-py-{time.time_ns()}-{stream}"
        raw = run.client.chat.completions.with_raw_response.create(
            model=run.model,
            messages=MESSAGES,
            max_tokens=4,
            stream=stream,
            extra_headers={"X-Request-Id": name},
        )
        expect(raw.headers.get("x-request-id") == name, dict(raw.headers))
        expect(raw.headers.get("x-sluice-worker"), dict(raw.headers))
        expect(raw.headers.get("x-sluice-rank", "").isdigit(), dict(raw.headers))
        expect(raw.headers.get("x-sluice-cached-tokens", "").isdigit(), dict(raw.headers))
        body = list(raw.parse()) if stream else [raw.parse()]
        expect(all(name in b.id for b in body), body[0])


@check("headers")
def request_id_is_made_when_none_is_given(run):
    first, second = run.chat(), run.chat()
    expect(first._request_id and second._request_id, first)
    expect(first._request_id != second._request_id, first._request_id)


def refusal(kind, function):
    try:
        answer = function()
        # The refusal of a stream must be a status as well, not an event.
        answer = answer if not isinstance(answer, openai.Stream) else list(answer)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")


@check("errors")
def unknown_model_is_not_found(run):
    for stream in (False, True):
        error = refusal(openai.NotFoundError, lambda s=stream: run.chat(model="no-such-model", stream=s))
        expect(error.status_code == 404, error)
        expect(error.code == "model_not_found", error.body)
        expect("no-such-model" in error.message and run.model in error.message, error.message)
        expect(error.response.headers.get("x-sluice-reason") == "unknown_model", error.response.headers)
        expect(error.request_id, error)


@check("errors")
def an_engines_own_fields_are_refused(run):
    for field in ({"kv_transfer_params": {"do_remote_prefill": True}}, {"bootstrap_room": 1}):
        for call in (run.chat, run.completion):
            for stream in (False, True):
                error = refusal(openai.BadRequestError, lambda c=call, f=field, s=stream: c(stream=s, extra_body=f))
                expect(error.type == "invalid_request_error", error.body)
                expect(next(iter(field)) in error.message, error.message)
                expect(error.response.headers.get("x-sluice-reason") == "forbidden_field", error.response.headers)
    expect(run.chat().choices[0].message.content)


@check("errors")
def wrong_types_are_refused(run):
    refusal(openai.BadRequestError, lambda: run.chat(messages="not a list"))
    refusal(openai.BadRequestError, lambda: run.chat(extra_body={"max_tokens": "many"}))


@check("abort")
def a_stream_left_early_harms_nothing(run):
    want = run.chat().choices[0].message.content
    for _ in range(3):
        with run.chat(stream=True, max_tokens=512, extra_body={"ignore_eos": True}) as stream:
            for i, _ in enumerate(stream):
                if i == 2:
                    break
    expect(run.chat().choices[0].message.content == want)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url", help="base URL, such as http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="", help="model name; default: the first model listed")
    parser.add_argument("--skip", default="", help="comma-separated groups to skip")
    args = parser.parse_args()
    skip = {g for g in args.skip.split(",") if g}
    unknown = skip - {g for g, _ in CHECKS}
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}")

    print(f"python openai {openai.__version__}")
    try:
        run = Run(args.base_url, args.model)
    except (openai.OpenAIError, IndexError) as error:
        print(f"  FAIL the server lists a model: {type(error).__name__}: {error}\n0 passed, 1 failed")
        return 1
    passed = failed = 0
    for group, function in CHECKS:
        if group in skip:
            continue
        name = function.__name__.replace("_", " ")
        try:
            function(run)
            passed += 1
            print(f"  ok   {name}")
        except Exception as error:
            failed += 1
            print(f"  FAIL {name}: {type(error).__name__}: {str(error)[:2000]}")
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=4)
        sys.stdout.flush()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
