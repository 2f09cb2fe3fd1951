"""A chat preprocessor: vLLM's tokenizer and the model's chat template here, the engines behind a Sluice router.

usage: vllm_preprocessor.py [--key-env NAME] [--max-tokens N] [--json] ADDRESS MODEL TOKENIZER MESSAGE...

ADDRESS is unix:///PATH or tcp://HOST:PORT, TOKENIZER a folder or a name of the hub. Each MESSAGE is a
conversation of its own; all are asked at once on one connection. --json prints token ids too, an object a
line. Needs vLLM, and this package. Importing vLLM takes a minute on a slow machine.
"""

import argparse
import asyncio
import json
import os

from sluice_engineapi import Context, Request, EngineClient
from vllm.tokenizers import get_tokenizer


class Preprocessor:
    def __init__(self, engine: EngineClient, model: str, tokenizer: str) -> None:
        self.engine, self.model = engine, model
        self.tokenizer = get_tokenizer(tokenizer)

    def render(self, messages: list[dict], max_tokens: int = 64, **sampling) -> Request:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return Request(
            token_ids=ids, model=self.model, stop_conditions={"max_tokens": max_tokens},
            sampling_options=sampling, eos_token_ids=[self.tokenizer.eos_token_id], annotations=["decision"],
        )

    async def chat(self, request: Request, context: Context):
        """Pieces of text as they come, each with the tokens since the last and the router's comments."""
        ids, reported = [], 0
        async with self.engine.generate(request, context) as answer:
            async for item in answer:
                if item.is_error():
                    raise RuntimeError(f"{context.id}: {item.error().message}")
                new = item.data().token_ids if item.data() else []
                ids += new
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                if text.endswith("\ufffd"):  # half a character: the next tokens complete it; the last one vLLM drops too
                    going = item.data() and item.data().finish_reason is None
                    text = text[:reported] if going else text.rstrip("\ufffd")
                yield text[reported:], new, item.comments()
                reported = len(text)


async def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    for name in ("address", "model", "tokenizer"):
        parser.add_argument(name)
    parser.add_argument("message", nargs="+")
    parser.add_argument("--key-env", default="SLUICE_KEY")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    async with EngineClient(args.address, token=os.environ.get("SLUICE_ENGINE_API_TOKEN"), key=os.environ.get(args.key_env)) as engine:
        preprocessor = Preprocessor(engine, args.model, args.tokenizer)

        async def ask(message: str) -> dict:
            request = preprocessor.render([{"role": "user", "content": message}], args.max_tokens, temperature=0.0)
            pieces = [piece async for piece in preprocessor.chat(request, Context(timeout=300))]
            answer = {"message": message, "prompt_token_ids": request.token_ids, "text": "".join(text for text, _, _ in pieces)}
            return {**answer, "token_ids": sum((ids for _, ids, _ in pieces), []), "comments": sum((c for _, _, c in pieces), [])}

        for answer in await asyncio.gather(*map(ask, args.message)):
            print(json.dumps(answer) if args.json else f"> {answer['message']}\n{answer['text']}")


if __name__ == "__main__":
    asyncio.run(main())
