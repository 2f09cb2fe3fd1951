"""Streams that can migrate from one engine to another while they are read."""

import json
import threading
import time

import http_calls
import prompts

TOKENS = 160


def longer(path, body):
    if path == "/inference/v1/generate":
        return {**body, "sampling_params": {**body["sampling_params"], "max_tokens": TOKENS, "ignore_eos": True}}
    if path == "/v1/responses":
        return {**body, "max_output_tokens": TOKENS}
    if path == "/v1/messages":
        return {**body, "max_tokens": TOKENS}
    return {**body, "max_tokens": TOKENS, "ignore_eos": True}


class Stream(threading.Thread):
    """One streamed request, read event by event."""

    def __init__(self, url, path, body, has_ids):
        super().__init__(daemon=True)
        self.name, self.what = f"`{path}`", "text"
        self.path, self.body, self.has_ids = path, longer(path, body), has_ids
        self.url = url
        self.lines = []
        self.worker = self.migration = ""
        self.error = None

    def run(self):
        asked = {**self.body, "stream": True}
        if self.has_ids:
            asked["stream_options"] = {"include_usage": True}
        try:
            with http_calls.Open(self.url, self.path, asked) as answer:
                self.worker = answer.response.headers["X-Sluice-Worker"]
                self.migration = answer.response.headers["X-Sluice-Migration"]
                for line in answer.response:
                    if line.startswith(b"data: "):
                        self.lines.append(line[len(b"data: "):].decode().strip())  # fmt: skip
        except Exception as error:
            self.error = error

    def broke(self):
        """Reports whether the stream ended with an error event."""
        return any('"error"' in line for line in self.lines)

    def result(self):
        """Returns the text (or ids), the usage (prompt, output), and the faults of the stream."""
        match self.path:
            case "/v1/messages":
                return self.messages_result()
            case "/v1/responses":
                return self.responses_result()
        text, usage, wrong, identities, finishes = "", None, [], set(), 0
        if self.path == "/inference/v1/generate":
            text = []
        for line in self.lines[:-1]:
            event = json.loads(line)
            if "error" in event:
                wrong.append(event["error"])
                continue
            identities.add(tuple(event.get(k) for k in ("id", "request_id", "created", "model", "object")))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finishes += choice.get("finish_reason") is not None
                if self.path == "/inference/v1/generate":
                    text += choice.get("token_ids") or []
                    continue
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if choice.get("token_ids") is not None:
                    wrong.append("token ids that the request did not ask for")
        if self.error or self.lines[-1:] != ["[DONE]"] or len(identities) != 1 or finishes != 1:
            wrong.append(f"{self.error}, last {self.lines[-1:]}, {len(identities)} identities, {finishes} finishes")
        return text, usage and (usage["prompt_tokens"], usage["completion_tokens"]), wrong

    def messages_result(self):
        text, usage, wrong, kinds = "", None, [], []
        for event in map(json.loads, self.lines):
            kind = event["type"]
            if not kinds or kinds[-1] != kind:
                kinds.append(kind)
            if kind == "error":
                wrong.append(event)
            elif kind == "content_block_delta":
                text += event["delta"]["text"]
            elif kind == "message_delta":
                usage = (event["usage"]["input_tokens"], event["usage"]["output_tokens"])
        if kinds != ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"]:
            wrong.append(kinds)
        return text, usage, wrong

    def responses_result(self):
        text, usage, wrong = "", None, []
        for number, event in enumerate(map(json.loads, self.lines)):
            if event.get("sequence_number") != number:
                wrong.append(f"event {number} is numbered {event.get('sequence_number')}: {event['type']}")
            if event["type"] == "error":
                wrong.append(event)
            elif event["type"] == "response.output_text.delta":
                text += event["delta"]
            elif event["type"] in ("response.completed", "response.incomplete"):
                end = event["response"]
                usage = (end["usage"]["input_tokens"], end["usage"]["output_tokens"])
                if end["output"][0]["content"][0]["text"] != text:
                    wrong.append(end["output"])
        if usage is None:
            wrong.append(self.lines[-1:])
        return text, usage, wrong

    def alone(self, url):
        """Sends the request to one engine directly and returns the text and the usage."""
        answer = http_calls.post(url, self.path, {**self.body, "cache_salt": f"alone-{time.time_ns()}"})
        usage = answer.json()["usage"]
        pairs = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
        return prompts.generated(self.path, answer), next(tuple(usage[k] for k in pair) for pair in pairs if pair[0] in usage)
