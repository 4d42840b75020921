"""Writes GGUF files with random weights, without a vocabulary, of the shapes that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Shape = tuple[int, ...]

BLOCK = 32
"""Elements of a block of Q4_0 and of MXFP4."""
SCALE = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)
"""Of Q4_0's random blocks: weights between -0.032 and 0.028."""
POWER = np.array([119], np.uint8)
"""Of MXFP4's: weights between -6/256 and 6/256."""


def llama_tensors(raw: Mapping[str, Any]) -> Iterator[tuple[str, Shape, str]]:
    """Yields names, shapes and types of a LLaMA's tensors."""
    hidden, inner = raw["hidden_size"], raw["intermediate_size"]
    kv = raw["num_key_value_heads"] * hidden // raw["num_attention_heads"]
    for name in ("token_embd", "output"):
        yield f"{name}.weight", (raw["vocab_size"], hidden), "Q4_0"
    yield "output_norm.weight", (hidden,), "F32"
    shapes: dict[str, Shape] = {
        **{"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)},
        **{"attn_output": (hidden, hidden), "ffn_gate": (inner, hidden)},
        **{"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)},
        **{"attn_norm": (hidden,), "ffn_norm": (hidden,)},
    }
    for layer in range(raw["num_hidden_layers"]):
        for name, shape in shapes.items():
            yield f"blk.{layer}.{name}.weight", shape, "F32" if len(shape) == 1 else "Q4_0"


def gpt_oss_tensors(raw: Mapping[str, Any]) -> Iterator[tuple[str, Shape, str]]:
    """Yields names, shapes and types of gpt-oss's tensors, as it is published."""
    hidden, width, experts = raw["hidden_size"], raw["intermediate_size"], raw["num_local_experts"]
    queries = raw["num_attention_heads"] * raw["head_dim"]
    kv = raw["num_key_value_heads"] * raw["head_dim"]
    for name in ("token_embd", "output"):
        yield f"{name}.weight", (raw["vocab_size"], hidden), "BF16"
    yield "output_norm.weight", (hidden,), "F32"
    products: dict[str, tuple[Shape, str]] = {
        "attn_q": ((queries, hidden), "BF16"),
        "attn_k": ((kv, hidden), "BF16"),
        "attn_v": ((kv, hidden), "BF16"),
        "attn_output": ((hidden, queries), "BF16"),
        "ffn_gate_inp": ((experts, hidden), "F32"),
        "ffn_gate_exps": ((experts, width, hidden), "MXFP4"),
        "ffn_up_exps": ((experts, width, hidden), "MXFP4"),
        "ffn_down_exps": ((experts, hidden, width), "MXFP4"),
    }
    for layer in range(raw["num_hidden_layers"]):
        for name, (shape, kind) in products.items():
            yield f"blk.{layer}.{name}.weight", shape, kind
            yield f"blk.{layer}.{name}.bias", shape[:-1], "F32"
        for name in ("attn_norm", "post_attention_norm"):
            yield f"blk.{layer}.{name}.weight", (hidden,), "F32"
        yield f"blk.{layer}.attn_sinks.weight", (raw["num_attention_heads"],), "F32"


def write_gguf(file: Path, raw: Mapping[str, Any]) -> None:
    """Writes a model of a known shape's config."""
    from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

    is_llama = raw["model_type"] == "llama"
    writer, rng = GGUFWriter(file, "llama" if is_llama else "gpt-oss"), np.random.default_rng(0)
    heads = raw["num_attention_heads"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_rope_dimension_count(raw.get("head_dim") or raw["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if not is_llama:
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
        writer.add_expert_count(raw["num_local_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_rope_freq_base(150000.0)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    kept: dict[tuple[Shape, str], np.ndarray] = {}
    for name, shape, kind in (llama_tensors if is_llama else gpt_oss_tensors)(raw):
        if (shape, kind) not in kept:
            kept[shape, kind] = _numbers(rng, shape, kind)
        numbers = np.zeros(shape, np.float32) if name.endswith("bias") else kept[shape, kind]
        dtype = None if kind == "F32" else GGMLQuantizationType[kind]
        writer.add_tensor(name, numbers, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _numbers(rng: np.random.Generator, shape: Shape, kind: str) -> np.ndarray:
    """Returns a tensor's bytes; ones for norms."""
    if kind == "F32" and len(shape) == 1:
        return np.ones(shape, np.float32)
    if kind in ("F32", "BF16"):
        small = 0.02 * rng.standard_normal(shape, np.float32)
        return small if kind == "F32" else small.astype(ml_dtypes.bfloat16).view(np.uint8)
    before = SCALE if kind == "Q4_0" else POWER
    size = len(before) + BLOCK // 2
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // BLOCK, size), np.uint8)
    blocks[..., : len(before)] = before
    return blocks.reshape(*shape[:-1], -1)
