"""Creates a tiny Llama model with random weights and its tokenizer, without a network.

usage: make_model.py FOLDER

The weights have a standard deviation of 0.2 instead of 0.02 so that greedy output varies
with the prompt: an engine that lost or confused KV then generates another text.
"""

import glob
import os
import sys
import sysconfig

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 4096


def texts():
    """Yields English text for the tokenizer's training: the descriptions of the installed packages."""
    site = sysconfig.get_paths()["purelib"]
    paths = sorted(glob.glob(os.path.join(site, "*.dist-info", "METADATA")))
    if len(paths) < 20:
        raise SystemExit(f"make_model: found only {len(paths)} package descriptions under {site}, need 20")
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as f:
            yield f.read()


def make_tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        bos_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def main(folder):
    os.makedirs(folder, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    # transformers 5 writes "TokenizersBackend", which other readers of the file reject.
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path, encoding="utf-8") as f:
        config = f.read()
    with open(path, "w", encoding="utf-8") as f:
        f.write(config.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=8192,
            initializer_range=0.2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
