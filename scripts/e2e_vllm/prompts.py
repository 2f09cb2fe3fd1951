"""Builds requests and extracts the texts of answers, for each endpoint."""

import itertools
import json
import time

from engines import MODEL

MAX_TOKENS = 24
_number = itertools.count(time.time_ns() % 100_000)


def text(words=60):
    """Returns a prompt of about 200 tokens that shares no prefix with another, of any run."""
    n = next(_number)
    return f"{n * 7919} boats in port {n}: " + " ".join(str((i * i * n + i) % 10_000) for i in range(words))


def completions(prompt):
    return {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}


def chat(prompt):
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }


def responses(prompt):
    return {"model": MODEL, "input": prompt, "max_output_tokens": MAX_TOKENS, "temperature": 0}


def generate(token_ids):
    return {
        "model": MODEL,
        "token_ids": token_ids,
        "sampling_params": {"max_tokens": MAX_TOKENS, "temperature": 0},
    }


def generated(path, answer, streamed=False):
    """Returns the text (or token ids) of the first choice, or the body of an error."""
    if answer.status != 200:
        return f"{answer.status} {answer.text()[:300]}"
    if streamed:
        events = answer.events()
        if events[-1] != "[DONE]":
            return f"no [DONE] at the end of {len(events)} events"
        choices = [c for e in events[:-1] for c in json.loads(e)["choices"]]
        if path.endswith("/chat/completions"):
            return "".join(c["delta"].get("content") or "" for c in choices)
        return "".join(c["text"] for c in choices)
    body = answer.json()
    match path:
        case "/v1/completions":
            return body["choices"][0]["text"]
        case "/v1/chat/completions":
            return body["choices"][0]["message"]["content"]
        case "/v1/responses":
            return "".join(c["text"] for o in body["output"] for c in o["content"])
        case "/v1/messages":
            return "".join(c["text"] for c in body["content"])
        case "/inference/v1/generate":
            return body["choices"][0]["token_ids"]
    raise ValueError(path)
