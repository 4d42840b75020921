"""Writes GGUF files with random weights, and words that mean nothing, of the shapes that are
compared."""

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
    """Yields names, shapes and types of gpt-oss's published tensors."""
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


def qwen_next_tensors(raw: Mapping[str, Any]) -> Iterator[tuple[str, Shape, str]]:
    """Yields names, shapes and types of a mixture of experts of Qwen3.5's kind in Q4_0."""
    hidden, width, experts = raw["hidden_size"], raw["moe_intermediate_size"], raw["num_experts"]
    for name in ("token_embd", "output"):
        yield f"{name}.weight", (raw["vocab_size"], hidden), "Q4_0"
    yield "output_norm.weight", (hidden,), "F32"
    queries, kv = raw["num_attention_heads"] * HEAD, raw["num_key_value_heads"] * HEAD
    values, heads = VALUE_HEADS * STATE, VALUE_HEADS
    channels = 2 * KEY_HEADS * STATE + values
    attention: dict[str, tuple[Shape, str]] = {
        **{"attn_q.weight": ((2 * queries, hidden), "Q4_0")},
        **{"attn_k.weight": ((kv, hidden), "Q4_0"), "attn_v.weight": ((kv, hidden), "Q4_0")},
        **{"attn_output.weight": ((hidden, queries), "Q4_0")},
        **{"attn_q_norm.weight": ((HEAD,), "F32"), "attn_k_norm.weight": ((HEAD,), "F32")},
    }
    state: dict[str, tuple[Shape, str]] = {
        **{"attn_qkv.weight": ((channels, hidden), "Q4_0")},
        **{"attn_gate.weight": ((values, hidden), "Q4_0"), "ssm_a": ((heads,), "F32")},
        **{"ssm_conv1d.weight": ((channels, 4), "F32"), "ssm_dt.bias": ((heads,), "F32")},
        **{"ssm_norm.weight": ((STATE,), "F32"), "ssm_out.weight": ((hidden, values), "Q4_0")},
        **{"ssm_beta.weight": ((heads, hidden), "F32")},
        **{"ssm_alpha.weight": ((heads, hidden), "F32")},
    }
    both: dict[str, tuple[Shape, str]] = {
        **{"attn_norm.weight": ((hidden,), "F32")},
        **{"post_attention_norm.weight": ((hidden,), "F32")},
        **{"ffn_gate_inp.weight": ((experts, hidden), "F32")},
        **{"ffn_gate_inp_shexp.weight": ((hidden,), "F32")},
    }
    for name in ("gate", "up", "down"):
        shape = (hidden, width) if name == "down" else (width, hidden)
        both[f"ffn_{name}_exps.weight"] = ((experts, *shape), "Q4_0")
        both[f"ffn_{name}_shexp.weight"] = (shape, "Q4_0")
    for layer in range(raw["num_hidden_layers"]):
        own = state if (layer + 1) % FULL_EVERY else attention
        for name, (shape, kind) in (both | own).items():
            yield f"blk.{layer}.{name}", shape, kind


HEAD, KEY_HEADS, VALUE_HEADS, STATE, FULL_EVERY = 256, 16, 32, 128, 4
"""Of Qwen3.6-35B-A3B: elements of an attention head; heads of keys and of values in layers with a
state, and the elements of each; every fourth layer attends."""

TENSORS = {
    "llama": ("llama", llama_tensors),
    "gpt_oss": ("gpt-oss", gpt_oss_tensors),
    "qwen3_5_moe_text": ("qwen35moe", qwen_next_tensors),
}
"""llama.cpp's name and the tensors of each kind of model."""


def write_gguf(file: Path, raw: Mapping[str, Any]) -> None:
    """Writes a model of a known shape's config."""
    from gguf import GGMLQuantizationType, GGUFWriter

    name, tensors = TENSORS[raw["model_type"]]
    writer, rng = GGUFWriter(file, name), np.random.default_rng(0)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    _add_words(writer, raw["vocab_size"])
    if raw["model_type"] == "gpt_oss":
        _of_gpt_oss(writer, raw)
    elif raw["model_type"] == "qwen3_5_moe_text":
        _of_qwen_next(writer, raw)
    else:
        writer.add_rope_dimension_count(raw["hidden_size"] // raw["num_attention_heads"])
        writer.add_layer_norm_rms_eps(1e-5)
    kept: dict[tuple[Shape, str], np.ndarray] = {}
    for name, shape, kind in tensors(raw):
        if (shape, kind) not in kept:
            kept[shape, kind] = _numbers(rng, shape, kind)
        numbers = (
            np.zeros(shape, np.float32) if name.endswith(("bias", "ssm_a")) else kept[shape, kind]
        )
        dtype = None if kind == "F32" else GGMLQuantizationType[kind]
        writer.add_tensor(name, numbers, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer: Any, count: int) -> None:
    """Adds a vocabulary of pieces: three special ones, one for each byte, and numbers."""
    from gguf import TokenType

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    others = range(len(pieces), count)
    writer.add_vocab_size(count)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + [f"w{number}" for number in others])
    writer.add_token_types(kinds + [TokenType.NORMAL] * len(others))
    writer.add_token_scores([-float(number) for number in range(count)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _of_gpt_oss(writer: Any, raw: Mapping[str, Any]) -> None:
    from gguf import RopeScalingType

    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(raw["head_dim"])
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


def _of_qwen_next(writer: Any, raw: Mapping[str, Any]) -> None:
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HEAD // 4)
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_expert_count(raw["num_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(KEY_HEADS)
    writer.add_ssm_time_step_rank(VALUE_HEADS)
    writer.add_ssm_inner_size(VALUE_HEADS * STATE)
    writer.add_uint32("qwen35moe.full_attention_interval", FULL_EVERY)


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
