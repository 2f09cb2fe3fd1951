"""Writes a tiny GGUF model of the Llama architecture with random weights.

usage: tiny_gguf.py FILE
"""

import sys

import gguf
import numpy as np

WIDTH, HEADS, HIDDEN, CONTEXT = 64, 4, 128, 512

# Three special tokens, then one token per byte as in SentencePiece's byte fallback.
tokens = [b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % b for b in range(256)]
types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256

w = gguf.GGUFWriter(sys.argv[1], "llama")
w.add_name("tiny")
w.add_context_length(CONTEXT)
w.add_embedding_length(WIDTH)
w.add_block_count(1)
w.add_feed_forward_length(HIDDEN)
w.add_head_count(HEADS)
w.add_head_count_kv(HEADS)
w.add_rope_dimension_count(WIDTH // HEADS)
w.add_layer_norm_rms_eps(1e-5)
w.add_vocab_size(len(tokens))
w.add_file_type(gguf.LlamaFileType.ALL_F32)
w.add_tokenizer_model("llama")
w.add_token_list(tokens)
w.add_token_scores([0.0] * len(tokens))
w.add_token_types(types)
w.add_unk_token_id(0)
w.add_bos_token_id(1)
w.add_eos_token_id(2)

random = np.random.default_rng(1)


def tensor(name, *shape):
    w.add_tensor(name, random.normal(0, 0.05, shape).astype(np.float32))


def norm(name):
    w.add_tensor(name, np.ones(WIDTH, dtype=np.float32))


tensor("token_embd.weight", len(tokens), WIDTH)
norm("output_norm.weight")
tensor("output.weight", len(tokens), WIDTH)
norm("blk.0.attn_norm.weight")
norm("blk.0.ffn_norm.weight")
for part in ("q", "k", "v", "output"):
    tensor(f"blk.0.attn_{part}.weight", WIDTH, WIDTH)
tensor("blk.0.ffn_gate.weight", HIDDEN, WIDTH)
tensor("blk.0.ffn_up.weight", HIDDEN, WIDTH)
tensor("blk.0.ffn_down.weight", WIDTH, HIDDEN)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
