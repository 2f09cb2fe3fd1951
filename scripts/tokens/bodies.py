"""Random request bodies for the tests of native tokenization."""

import copy
import random

# The APIs in the order in which cases take them.
APIS = ["chat", "chat", "messages", "responses", "chat", "messages", "responses", "completions"]


class Generator:
    """Random bodies: mostly what clients send, at times what they should not."""

    def __init__(self, seed):
        self.r = random.Random(seed)

    def one(self, *choices):
        return copy.deepcopy(self.r.choice(choices))

    def odd(self, usual, *odd):
        return self.one(*odd) if self.r.random() < 0.04 else usual

    def text(self):
        return self.one("", "hi", "Hello,\nworld", 'a "quoted" \\ text\t', "日本語 🦊", "<|im_start|>", "x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=2;\nYou are", "a\u0000b", "1 < 2 && 3 > 2")

    def schema(self):
        return self.one({"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer", "default": 3}}, "required": ["b"]}, {"properties": {}}, {}, {"type": "object", "x": 0.5, "n": None})

    def arguments(self):
        return self.one("{}", '{"b": 1, "a": [true, null, "x"]}', "", "not json", "[1]", "3", ' {"z": {"y": "é"}} ', "null", '{"a": NaN}', '{"u": "\\u00e9\\n"}')

    def call(self, i):
        c = {"type": "function", "id": f"call_{i}", "function": {"name": self.one("f", "get_weather"), "arguments": self.odd(self.arguments(), {"a": 1}, None)}}
        if self.r.random() < 0.2:
            c["index"] = i
        if self.r.random() < 0.1:
            c["function"]["extra"] = 1
        if self.r.random() < 0.03:
            c["type"] = self.one("custom", None)
        return c

    def parts(self, kinds=("text",)):
        out = []
        for _ in range(self.r.randint(0 if self.r.random() < 0.1 else 1, 3)):
            kind = self.odd(self.one(*kinds), "input_text", "image_url", "thinking", "refusal")
            part = {"type": kind, "text": self.text()}
            if kind == "image_url":
                part = {"type": kind, "image_url": {"url": "data:,"}}
            elif kind == "refusal":
                part = {"type": kind, "refusal": self.text()}
            elif kind == "thinking":
                part = {"type": kind, "thinking": self.text()}
            elif self.r.random() < 0.2:
                part["cache_control"] = {"type": "ephemeral"}
            out.append(self.odd(part, "plain", {"type": "text"}, {"type": "text", "text": None}, {"text": "untyped"}, 5))
        return out

    def content(self):
        return self.odd(self.text() if self.r.random() < 0.6 else self.parts(), None, 5, {})

    def message(self, i):
        role = self.odd(self.one("user", "assistant", "tool", "user", "assistant", "system" if i == 0 else "user", "developer" if i < 2 else "user"), "function", "custom", 5, "system", "developer")
        m = {"role": role, "content": self.content()}
        if role == "assistant":
            if self.r.random() < 0.4:
                m["tool_calls"] = [self.call(n) for n in range(self.r.randint(0, 2))]
                if self.r.random() < 0.5:
                    m["content"] = None
            if self.r.random() < 0.3:
                m[self.one("reasoning", "reasoning_content")] = self.odd(self.text(), None)
            if self.r.random() < 0.1:
                m["refusal"] = None
        if role == "tool":
            m["tool_call_id"] = self.odd("call_0", None, 5)
        if self.r.random() < 0.1:
            m["name"] = self.odd("bob", None)
        if self.r.random() < 0.1:
            m[self.one("prefix", "thinking", "id")] = self.one(True, "x")
        items = list(m.items())
        if self.r.random() < 0.2:
            self.r.shuffle(items)
        m = dict(items)
        if self.r.random() < 0.02:
            m.pop(self.one("role", "content"))
        return m

    def tool(self):
        f = {"name": self.one("f", "get_weather")}
        if self.r.random() < 0.7:
            f["description"] = self.odd(self.text(), None)
        if self.r.random() < 0.8:
            f["parameters"] = self.odd(self.schema(), None)
        if self.r.random() < 0.2:
            f["strict"] = self.one(True, False, None)
        if self.r.random() < 0.1:
            f["extra"] = 5
        return self.odd({"type": "function", "function": f}, {"function": f}, {"type": "other", "function": f}, dict(f, type="function"))

    def kwargs(self, body):
        if self.r.random() < 0.3:
            body["chat_template_kwargs"] = self.odd(self.one({"enable_thinking": False}, {"thinking": True, "x": "auto"}, {"enable_thinking": None}, {"reasoning_effort": "low", "y": [1, "a"]}, {}), None, 5, {"tools": []}, {"add_generation_prompt": False}, {"tokenize": True})

    def options(self, body):
        self.kwargs(body)
        if self.r.random() < 0.2:
            body["reasoning_effort"] = self.odd(self.one("none", "low", "high"), None, "other", "auto")
        if self.r.random() < 0.2:
            body["add_generation_prompt"] = self.odd(self.one(True, False), None)
        if self.r.random() < 0.2:
            body["continue_final_message"] = self.odd(self.one(True, False), None)
            if body["continue_final_message"]:
                body["add_generation_prompt"] = self.odd(False, True)
        if self.r.random() < 0.1:
            body["add_special_tokens"] = self.odd(self.one(True, False), None)
        if self.r.random() < 0.1:
            body["documents"] = self.odd([{"title": "t", "text": self.text()}], [{"n": 5}], [], None)
        if self.r.random() < 0.05:
            body[self.one("truncate_prompt_tokens", "chat_template", "truncation")] = self.one(5, "x", "auto")
        elif self.r.random() < 0.05:
            body["truncate_prompt_tokens"] = self.one(3, 20, -1)
            body["truncation_side"] = self.one("left", "right", None)

    def chat(self):
        body = {"model": "m", "messages": [self.message(i) for i in range(self.r.randint(1, 5))], "max_tokens": 5}
        if self.r.random() < 0.4:
            body["tools"] = [self.tool() for _ in range(self.r.randint(0 if self.r.random() < 0.1 else 1, 2))]
            if self.r.random() < 0.3:
                body["tool_choice"] = self.one("auto", "none", "required", None)
        self.options(body)
        return body

    def completions(self):
        body = {"model": "m", "prompt": self.odd(self.text(), ["a", "b"], [1, 2], ["a"]), "max_tokens": 5}
        if self.r.random() < 0.3:
            body["add_special_tokens"] = self.odd(self.one(True, False), None)
        if self.r.random() < 0.1:
            body[self.one("suffix", "echo", "truncate_prompt_tokens")] = self.one(None, True, 5)
        elif self.r.random() < 0.1:
            body["truncate_prompt_tokens"] = self.one(2, -1)
            body["truncation_side"] = self.one("left", "right", None)
        return body

    def block(self, role, i):
        kind = self.odd(self.one("text", "text", "tool_result" if role == "user" else "tool_use", "text" if role == "user" else "thinking"), "image", "redacted_thinking", "tool_result", "thinking", "tool_reference")
        b = {"type": kind}
        if kind == "text":
            b["text"] = self.text()
        elif kind == "thinking":
            b.update(thinking=self.text(), signature="s")
        elif kind == "tool_use":
            b.update(id=self.odd(f"toolu_{i}", ""), name="f", input=self.odd(self.one({}, {"b": 1, "a": "é"}), None))
        elif kind == "tool_result":
            b.update(tool_use_id=f"toolu_{i}", content=self.odd(self.one(self.text(), [{"type": "text", "text": self.text()}, {"type": "text", "text": self.text()}], []), None, [{"type": "image", "source": {}}]))
        elif kind == "image":
            b["source"] = {"type": "url", "url": "data:,"}
        elif kind == "redacted_thinking":
            b["data"] = "x"
        if self.r.random() < 0.1:
            b["cache_control"] = {"type": "ephemeral"}
        return b

    def messages(self):
        out = []
        for i in range(self.r.randint(1, 5)):
            role = "system" if i and self.r.random() < 0.1 else "assistant" if i % 2 else "user"
            out.append({"role": role, "content": self.text() if self.r.random() < 0.4 else [self.block(role, n) for n in range(self.r.randint(1, 3))]})
        body = {"model": "m", "messages": out, "max_tokens": 5000}
        if self.r.random() < 0.5:
            body["system"] = self.odd(self.text() if self.r.random() < 0.5 else [{"type": "text", "text": self.text()} for _ in range(2)], None)
        if self.r.random() < 0.4:
            body["tools"] = [dict({"name": "f", "input_schema": self.schema()}, **self.one({}, {"description": self.text()}, {"strict": True}, {"cache_control": {"type": "ephemeral"}})) for _ in range(self.r.randint(0, 2))]
            if self.r.random() < 0.3:
                body["tool_choice"] = self.one({"type": "auto"}, {"type": "none"}, {"type": "any"})
        if self.r.random() < 0.2:
            body["thinking"] = self.one({"type": "enabled", "budget_tokens": 2048}, {"type": "adaptive"}, {"type": "disabled"})
        if self.r.random() < 0.1:
            body["output_config"] = {"effort": self.one("low", "max")}
        self.kwargs(body)
        return body

    def item(self, i):
        kind = self.odd(self.one("message", "message", "assistant", "function_call", "function_call_output", "reasoning"), "system", "developer", "image", "item_reference", "custom_tool_call", "custom_tool_call_output")
        if kind == "function_call":
            return dict({"type": kind, "call_id": f"call_{i}", "name": "f", "arguments": self.one("{}", '{"a": 1}', "x")}, **self.one({}, {"id": "fc_1", "status": "completed"}))
        if kind == "custom_tool_call":
            return {"type": kind, "call_id": f"call_{i}", "name": "c", "input": self.text()}
        if kind in ("function_call_output", "custom_tool_call_output"):
            return {"type": kind, "call_id": f"call_{i}", "output": self.odd(self.text(), [{"type": "input_text", "text": "x"}])}
        if kind == "reasoning":
            return dict({"type": kind, "summary": self.one([], [{"type": "summary_text", "text": self.text()}])}, **self.one({}, {"id": "rs_1"}, {"content": [{"type": "reasoning_text", "text": self.text()}]}, {"content": []}))
        if kind == "item_reference":
            return {"type": kind, "id": "x"}
        if kind == "assistant":
            content = self.one(self.text(), [{"type": "output_text", "text": self.text()}], [{"type": "output_text", "text": self.text(), "annotations": []}, {"type": "output_text", "text": "second"}])
            return dict({"role": "assistant", "content": content, "type": "message"}, **self.one({}, {"id": "msg_1", "status": "completed"}, {"status": "in_progress"}))
        role = kind if kind in ("system", "developer") else "user"
        content = [{"type": "input_image", "image_url": "data:,", "detail": "auto"}] if kind == "image" else self.one(self.text(), [{"type": "input_text", "text": self.text()} for _ in range(2)])
        return dict({"role": role, "content": content}, **self.one({}, {"type": "message"}))

    def response_tool(self):
        function = dict({"type": "function", "name": "f", "parameters": self.schema()}, **self.one({}, {"description": self.text()}, {"strict": True}, {"strict": None}))
        if self.r.random() < 0.9:
            return function
        return self.one(
            {"type": "web_search"},
            {"type": "web_search_preview", "search_context_size": "low"},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "custom", "name": "c", "description": self.text()},
            {"type": "custom", "name": "c", "format": {"type": "text"}},
            {"type": "namespace", "name": "n", "description": "d", "tools": [function, {"type": "custom", "name": "c"}]},
            dict(function, defer_loading=True),
        )

    def responses(self):
        body = {"model": "m", "input": self.text() if self.r.random() < 0.3 else [self.item(i) for i in range(self.r.randint(1, 6))]}
        if self.r.random() < 0.4:
            body["instructions"] = self.odd(self.text(), None)
        if self.r.random() < 0.4:
            body["tools"] = [self.response_tool() for _ in range(self.r.randint(0, 2))]
        if self.r.random() < 0.2:
            body["reasoning"] = self.odd({"effort": self.one("none", "low", "high")}, {}, None)
        if self.r.random() < 0.1:
            body["truncation"] = self.one("auto", "disabled", None)
        if self.r.random() < 0.05:
            body["previous_response_id"] = "resp_1"
        self.kwargs(body)
        return body
