"""A chat preprocessor: vLLM's tokenizer and the model's chat template here, the engines behind a Sluice router.

usage: vllm_preprocessor.py [--token-env NAME] ADDRESS MODEL TOKENIZER MESSAGE...

ADDRESS is unix:///PATH or tcp://HOST:PORT, TOKENIZER a folder or a name of the hub. Each MESSAGE is a
conversation of its own; all are asked at once on one connection. Needs vLLM, and this package.
"""

import argparse
import asyncio
import os

from sluice_routed import Context, Request, RoutedEngine
from vllm.tokenizers import get_tokenizer


class Preprocessor:
    def __init__(self, engine: RoutedEngine, model: str, tokenizer: str) -> None:
        self.engine, self.model = engine, model
        self.tokenizer = get_tokenizer(tokenizer)

    def render(self, messages: list[dict], **sampling) -> Request:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        max_tokens = sampling.pop("max_tokens", 64)
        return Request(
            token_ids=ids, model=self.model, stop_conditions={"max_tokens": max_tokens},
            sampling_options=sampling, eos_token_ids=[self.tokenizer.eos_token_id], annotations=["decision"],
        )

    async def chat(self, messages: list[dict], context: Context, **sampling):
        """Pieces of text as they come."""
        ids, said = [], 0
        async with self.engine.generate(self.render(messages, **sampling), context) as answer:
            async for item in answer:
                if item.is_error():
                    raise RuntimeError(f"{context.id}: {item.error().message}")
                if item.data() is None:
                    continue
                ids += item.data().token_ids
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                if item.data().finish_reason is None and text.endswith("\ufffd"):
                    continue  # half a character: the next tokens complete it
                yield text[said:]
                said = len(text)


async def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    for name in ("address", "model", "tokenizer"):
        parser.add_argument(name)
    parser.add_argument("message", nargs="+")
    parser.add_argument("--token-env", default="SLUICE_ROUTED_TOKEN")
    args = parser.parse_args()
    async with RoutedEngine(args.address, token=os.environ.get(args.token_env)) as engine:
        preprocessor = Preprocessor(engine, args.model, args.tokenizer)

        async def ask(message: str) -> str:
            pieces = preprocessor.chat([{"role": "user", "content": message}], Context(timeout=60), temperature=0.0)
            return "".join([piece async for piece in pieces])

        for message, text in zip(args.message, await asyncio.gather(*map(ask, args.message))):
            print(f"> {message}\n{text}")


if __name__ == "__main__":
    asyncio.run(main())
