"""Records how vLLM refuses requests that exceed its context length, for
router/e2e/scheduling/testdata/context_length_vllm032.json.

usage: VENV/bin/python scripts/tokens/context_length.py --cache DIR FILE

DIR is where scripts/e2e-vllm.sh keeps vLLM and its tiny model."""

import argparse
import json
import os
import sys
import tempfile

here = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(os.path.dirname(here), "e2e_vllm")]

import http_calls  # noqa: E402
from engines import MODEL, Engine, wait_ready  # noqa: E402

LENGTH = 128
LONG = " ".join(str(7 * i) for i in range(200))
CASES = [
    ("one id too many", "/v1/completions", {"prompt": [5] * (LENGTH + 1)}),
    ("ids", "/v1/completions", {"prompt": [5] * (LENGTH + 12), "stream": True}),
    ("a completion's max_tokens", "/v1/completions", {"prompt": [5, 6], "max_tokens": LENGTH + 1}),
    ("both limits of a completion", "/v1/completions", {"prompt": [5] * (LENGTH + 1), "max_tokens": LENGTH + 1}),
    ("a chat's max_tokens", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}),
    ("a chat's max_completion_tokens", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 200, "max_tokens": 5}),
    ("max_output_tokens", "/v1/responses", {"input": "hi", "max_output_tokens": 500}),
    ("max_tokens of messages", "/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}),
    ("a chat's text", "/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--cache", required=True)
    p.add_argument("file")
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluice-context-") as run_dir:
        engine = Engine(a.cache, run_dir, "engine", more=("--max-model-len", str(LENGTH)))
        out = []
        try:
            wait_ready([engine])
            for name, path, body in CASES:
                answer = http_calls.post(engine.url, path, {"model": MODEL, **body})
                if answer.status != 400:
                    raise RuntimeError(f"{name}: status {answer.status}: {answer.text()}")
                out.append({"name": name, "path": path, "body": {"model": "sim", **body}, "answer": answer.text(), "native": "text" in name})
        finally:
            engine.stop()
    with open(a.file, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in out) + "\n]\n")


main()
