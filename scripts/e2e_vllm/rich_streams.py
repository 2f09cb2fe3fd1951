"""Streams with more than one text, which migrate only if the configuration allows it:
log-probabilities, several choices, structured output."""

import json
import time

import http_calls
import prompts
from moving import TOKENS, Stream

# Long, so that these streams still run when the last of the other streams has started.
COMMON = "The harbour master wrote down every boat that came in that night, its name, its flag and its cargo, " * 3
TEXTS = [COMMON + end for end in ("and by the morning there was no page left.", "but nobody ever read a word of it.", "and then he slept.")]


def scored(path, body):
    return path, "text, tokens and offsets", {**body, "max_tokens": TOKENS, "ignore_eos": True}


# Name, endpoint, compared values, and the request for a prompt. Two choices with top_k 1 are
# equal, as are those of an engine alone; vLLM refuses several choices at temperature 0.
RICH_KINDS = (
    ("chat with log-probabilities", lambda p: scored("/v1/chat/completions", {**prompts.chat(p), "logprobs": True, "top_logprobs": 2})),
    ("completions with log-probabilities", lambda p: scored("/v1/completions", {**prompts.completions(p), "logprobs": 2})),
    ("completions with log-probabilities, without alternatives", lambda p: scored("/v1/completions", {**prompts.completions(p), "logprobs": 0})),
    ("two choices", lambda p: ("/v1/chat/completions", "texts", {**prompts.chat(p), "n": 2, "temperature": 1, "top_k": 1, "max_tokens": 3 * TOKENS, "ignore_eos": True})),
    ("one of three texts", lambda p: ("/v1/chat/completions", "text", {**prompts.chat(p), "max_tokens": 600, "structured_outputs": {"choice": TEXTS}})),
)


class RichStream(Stream):
    """One streamed request of TELLING."""

    def __init__(self, url, kind):
        name, make = kind
        path, what, body = make(prompts.text())
        super().__init__(url, path, body, True)
        self.name, self.what, self.body = name, what, body
        self.values = self.values_alone = []

    def result(self):
        choices, usage, wrong = {}, None, []
        for line in self.lines[:-1]:
            event = json.loads(line)
            if "error" in event:
                wrong.append(event["error"])
                continue
            if event.get("usage"):
                if usage:
                    wrong.append("a second usage")
                usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
            for choice in event["choices"]:
                one = choices.setdefault(choice["index"], {"text": "", "finish": [], "logprobs": []})
                one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if choice.get("finish_reason"):
                    one["finish"].append(choice["finish_reason"])
                if choice.get("logprobs"):
                    one["logprobs"].append(choice["logprobs"])
        if self.error or self.lines[-1:] != ["[DONE]"]:
            wrong.append(f"{self.error}, last {self.lines[-1:]}")
        wrong += [f"choice {i} ends {one['finish']}" for i, one in choices.items() if len(one["finish"]) != 1]
        if sum(len(one["finish"]) for one in choices.values()) != self.body.get("n", 1):
            wrong.append(f"{len(choices)} choices")
        result, self.values = digest([choices[i] for i in sorted(choices)])
        return result, usage, wrong

    def alone(self, url):
        answer = http_calls.post(url, self.path, {**self.body, "cache_salt": f"alone-{time.time_ns()}"})
        if answer.status != 200:
            return f"{answer.status} {answer.text()[:300]}", None
        body = answer.json()
        choices = [
            {
                "text": choice["text"] if "text" in choice else choice["message"]["content"],
                "finish": [choice["finish_reason"]],
                "logprobs": [choice["logprobs"]] if choice.get("logprobs") else [],
            }
            for choice in body["choices"]
        ]
        result, self.values_alone = digest(choices)
        return result, (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])


def digest(choices):
    """Returns the parts that must be equal to the last byte, and the values that can differ slightly."""
    result, values = [], []
    for one in choices:
        tokens, offsets, alternatives = [], [], []
        for logprobs in one["logprobs"]:
            for item in logprobs.get("content") or []:
                tokens.append((item["token"], item["bytes"]))
                values.append(item["logprob"])
                # Once per spelling: the router requests the rest of a migrated chat as completions,
                # where the engine keys the alternatives by their text (docs/migration.md).
                alternatives.append(len({top["token"] for top in item["top_logprobs"]}))
            tokens += logprobs.get("tokens") or []
            offsets += logprobs.get("text_offset") or []
            values += logprobs.get("token_logprobs") or []
            alternatives += [len(top) for top in logprobs.get("top_logprobs") or []]
        result.append((one["text"], one["finish"], tokens, offsets, alternatives))
    return result, values
