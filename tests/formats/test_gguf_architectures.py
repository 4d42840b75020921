"""Every architecture of GGUF that is read: files with the names of the package `gguf`, by
llama.cpp's rules, give the logits of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import gguf

from flexgen_jax import LLM
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.architectures import ARCHITECTURES
from tests.helpers.families import BASE, EXPERTS, GLM, LONG, MISTRAL4_ROPE, Reference, rope
from tests.helpers.models import prompts

Keys = Mapping[str, Any]
"""Metadata: `{arch}.` is left out."""

YARN = rope("yarn", truncate=False, beta_fast=32.0, beta_slow=1.0, **LONG)
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 24,
}

EVERY_SECOND = ["sliding_attention", "full_attention", "sliding_attention"]
FULL = ["full_attention"] * 3
STATE_KEYS = {
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 48,
}
HEADS = {"num_key_value_heads": 4}
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 18,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "expert_shared_count": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}
INDEXED_KEYS = LATENT_KEYS | {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 96,
    "expert_shared_count": 1,
}

CASES: dict[str, tuple[str, dict[str, Any], Keys]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 16}, {}),
    "qwen2moe": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
        {"expert_shared_feed_forward_length": 24},
    ),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}, {}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        {
            "attention.sliding_window": 7,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}
        | {
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"attention.sliding_window": 7, "rope.freq_base": 1e6},
    ),
    "phi3": (
        "phi3",
        {"sliding_window": 9},
        {
            "attention.sliding_window": 9,
            "rope.dimension_count": 4,
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 40,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(96 / 40) / np.log(40))),
        },
    ),
    "olmo2": ("olmo2", {}, {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}, {}),
    "starcoder2": ("starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, {}),
    "glm4moe": (
        "glm4_moe",
        GLM
        | {"head_dim": 16, "routed_scaling_factor": 2.5, "use_qk_norm": True}
        | {"attention_bias": True, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        {
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "rope.dimension_count": 8,
        },
    ),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        {"expert_shared_feed_forward_length": 32, "leading_dense_block_count": 1},
    ),
    "minimax-m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
        {"rope.dimension_count": 8},
    ),
    "qwen3next": (
        "qwen3_next",
        EXPERTS
        | {"shared_expert_intermediate_size": 24, "head_dim": 16, "num_hidden_layers": 4}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
        | {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
        {
            "expert_shared_feed_forward_length": 24,
            "rope.dimension_count": 4,
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 8,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 48,
        },
    ),
    "qwen35": (
        "qwen3_5",
        {"num_hidden_layers": 3},
        {"attention.recurrent_layers": [True, False, True], **STATE_KEYS},
    ),
    "qwen35moe": (
        "qwen3_5_moe",
        {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
        {
            "expert_shared_feed_forward_length": 16,
            "full_attention_interval": 4,
            "nextn_predict_layers": 0,
            **STATE_KEYS,
        },
    ),
    "qwen3vl": ("qwen3_vl", {}, {"n_deepstack_layers": 1, "rope.dimension_sections": [4, 2, 2, 0]}),
    "qwen3vlmoe": ("qwen3_vl_moe", {}, {}),
    "gemma4": (
        "gemma4",
        {},
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, True, False],
            "attention.key_length": 24,
            "attention.value_length": 24,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "attention.head_count_kv": [2, 2, 1],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "rope.dimension_count": 24,
            "rope.dimension_count_swa": 16,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "hy_v3": (
        "hy_v3",
        {},
        {
            "expert_shared_feed_forward_length": 16,
            "expert_weights_scale": 2.826,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
    "mistral3": (
        "ministral3",
        {"sliding_window": None, **MISTRAL4_ROPE},
        {
            **YARN_KEYS,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
    ),
    "deepseek2": (
        "deepseek_v3",
        HEADS | {"n_shared_experts": 2, **rope("yarn", mscale=1.0, mscale_all_dim=1.0, **LONG)},
        {
            "expert_gating_func": 2,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "expert_group_count": 3,
            "expert_group_used_count": 2,
            **YARN_KEYS,
            **LATENT_KEYS,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}, {}),
    "seed_oss": ("seed_oss", {"head_dim": 16}, {}),
    "exaone4": (
        "exaone4",
        {"sliding_window": 6, "sliding_window_pattern": 2, "layer_types": EVERY_SECOND},
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "glm4": ("glm4", {"head_dim": 16}, {"rope.dimension_count": 8}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}, {}),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 3},
        {
            "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": 32,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "shortconv.l_cache": 3,
        },
    ),
    "lfm2moe": (
        "lfm2_moe",
        {"num_hidden_layers": 3},
        {
            "attention.head_count_kv": [0, 2, 0],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
    "mistral4": (
        "mistral4",
        HEADS | {"first_k_dense_replace": 0},
        {
            **LATENT_KEYS,
            **YARN_KEYS,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "attention.temperature_scale": 0.1,
            "attention.temperature_length": 8,
            "leading_dense_block_count": 0,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
        },
    ),
    "deepseek32": ("deepseek_v32", HEADS, {**INDEXED_KEYS}),
    "glm-dsa": ("glm_moe_dsa", HEADS, {**INDEXED_KEYS}),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7}
        | YARN,
        {"attention.sliding_window": 7, **YARN_KEYS},
    ),
}


VARIANTS: dict[str, tuple[str, str, dict[str, Any], Keys]] = {
    "no windows": ("exaone4", "exaone4", {"sliding_window": None, "layer_types": FULL}, {}),
    "biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "windows": (
        "olmo2",
        "olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e5, **LONG},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            "attention.sliding_window": 5,
            "attention.sliding_window_pattern": [False, True, True],
            "rope.freq_base": 1e5,
            "rope.freq_base_swa": 1e4,
            **YARN_KEYS,
        },
    ),
    "softmax": (
        "deepseek2",
        "deepseek_v2",
        HEADS
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 3}
        | {"topk_group": 2, "routed_scaling_factor": 2.0, "first_k_dense_replace": 2}
        | rope("yarn", mscale=0.7, mscale_all_dim=0.7, **LONG),
        {
            **{key: value for key, value in LATENT_KEYS.items() if "q_lora" not in key},
            "expert_shared_count": 1,
            "expert_weights_norm": False,
            "expert_weights_scale": 2.0,
            "expert_group_count": 3,
            "expert_group_used_count": 2,
            "leading_dense_block_count": 2,
            "rope.scaling.yarn_log_multiplier": 0.07,
            **YARN_KEYS,
        },
    ),
}
"""Architectures, families, fields and metadata."""


def metadata(config: Any) -> Keys:
    """What every architecture has."""
    num_experts = next(
        (
            getattr(config, name)
            for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
            if getattr(config, name, None)
        ),
        0,
    )
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    counts = ("num_experts_per_tok", "moe_k", "top_k_experts")
    chosen = next((getattr(config, name) for name in counts if getattr(config, name, None)), None)
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "norm_epsilon", None),
        "rope.freq_base": (config.rope_parameters or {}).get("rope_theta"),
    }
    if num_experts:
        keys |= {
            "expert_count": num_experts,
            "expert_used_count": chosen,
            "expert_feed_forward_length": width,
        }
    return {key: value for key, value in keys.items() if value is not None}


def stored(arch: str, config: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file, by llama.cpp's rules of conversion."""
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in state.items():
        array, name = tensor.float().numpy(), name.replace("language_model.", "")
        is_tied = name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False)
        if is_tied or re.search(r"visual|vision|indexer|mtp", name):
            continue
        for part, rows in split(arch, name, array):
            if ARCHITECTURES[arch].is_woven and ("q_proj" in part or "k_proj" in part):
                heads = config.num_attention_heads
                heads = heads if "q_proj" in part else config.num_key_value_heads
                shape = rows.shape
                rows = rows.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
            adds_one = ARCHITECTURES[arch].adds_one
            if adds_one and part.endswith("norm.weight") and "linear_attn" not in part:
                rows = rows + 1
            theirs = SCALES.get(part.rpartition(".layers.")[2][2:])
            if theirs is None:
                theirs = table.get_name(part, try_suffixes=(".weight", ".bias"))
            else:
                theirs = f"blk.{part.split('.')[2]}.{theirs}"
            assert theirs is not None, part
            is_bare = not theirs.endswith((".weight", ".bias", ".scale"))
            end = ".bias" if "exp_probs_b" in theirs else ".weight"
            yield theirs + (end if is_bare and "ssm_a" not in theirs else ""), rows


SCALES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
"""Names of tensors that the package does not map."""


def tiled(array: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
    """The four value heads of two key heads, one of each key head after the other."""
    heads = np.moveaxis(array, axis, 0)
    heads = heads.reshape(2, 2, size, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)
    return np.moveaxis(heads, 0, axis)


def with_tiled_heads(name: str, array: np.ndarray) -> np.ndarray:
    """A tensor of Qwen3.5, with 4 value heads of 12, and two key heads of 8."""
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([array[:32], tiled(array[32:], 12)])
    if name.endswith("in_proj_z.weight"):
        return tiled(array, 12)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return tiled(array, 1)
    return tiled(array, 12, axis=1) if name.endswith("linear_attn.out_proj.weight") else array


def split(arch: str, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices of a tensor, under names that the package knows."""
    if arch.startswith("qwen35"):
        array = with_tiled_heads(name, array)
    if name.endswith("kv_b_proj.weight"):  # 4 heads with keys of 10 and values of 12
        keys, values = np.split(array.reshape(4, 22, -1), [10], axis=1)
        yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif arch == "lfm2moe" and "experts." in name:
        before, _, matrix = name.rpartition("experts.")
        parts = zip(("w1", "w3"), np.split(array, 2, axis=1), strict=True)
        for part, rows in parts if matrix == "gate_up_proj" else [("w2", array)]:
            yield f"{before.removeprefix('model.')}experts.{part}.weight", rows
    elif arch == "gemma4" and "experts." in name:
        yield f"{name}.weight", array
    elif "experts.gate_up_proj" in name:
        before, is_bias = name.partition("gate_up_proj")[0], name.endswith("bias")
        end = ".bias" if is_bias else ".weight"
        if arch == "gpt-oss":
            gate, up = array[..., ::2], array[..., 1::2]
            gate, up = (gate, up) if is_bias else (gate.swapaxes(1, 2), up.swapaxes(1, 2))
        else:
            gate, up = np.split(array, 2, axis=1)
        yield f"{before}gate_proj{end}", gate
        yield f"{before}up_proj{end}", up
    elif "experts.down_proj" in name:
        is_bias = name.endswith("bias")
        rows = array.swapaxes(1, 2) if arch == "gpt-oss" and not is_bias else array
        yield f"{name.partition('down_proj')[0]}down_proj{'.bias' if is_bias else '.weight'}", rows
    elif "in_proj_qkvz" in name:  # key head by key head: 2 of 8, and values and gates of 2 x 12
        before = name.partition("in_proj_qkvz")[0]
        heads = array.reshape(2, 64, -1)
        queries, keys, values, gates = np.split(heads, [8, 16, 40], axis=1)
        whole = [x.reshape(-1, array.shape[1]) for x in (queries, keys, values)]
        yield f"{before}in_proj_qkv.weight", np.concatenate(whole)
        yield f"{before}in_proj_z.weight", gates.reshape(-1, array.shape[1])
    elif name.endswith("A_log"):
        yield name, -np.exp(array)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), array
    elif "conv1d" in name or "conv.conv" in name:
        yield name, array[:, 0]
    elif name.endswith("expert_bias"):
        yield f"{name}.bias", array
    elif name.endswith("e_score_correction_bias"):
        name = name.replace("correction_bias", "correction.bias")
        name = name.replace("gate.moe_statics", "moe_statics")
        if arch == "minimax-m2":
            name = name.replace("mlp", "block_sparse_moe")
        yield name, array[0] if array.ndim == 2 else array
    else:
        yield name, array


def write(path: Path, arch: str, config: Any, state: Mapping[str, Any], more: Keys) -> None:
    config = getattr(config, "text_config", config)
    config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**metadata(config), **more}.items():
        add = {bool: writer.add_bool, float: writer.add_float32, str: writer.add_string}
        name = key if key.startswith("split.") else f"{arch}.{key}"
        add.get(type(value), writer.add_array if isinstance(value, list) else writer.add_uint32)(
            name, value
        )
    names = [f"t{n}" for n in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([1] * len(names))
    writer.add_token_merges([])
    if arch == "phi3":
        for name in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if arch == "gemma4":  # a quarter of a head of 24 is rotated, in pairs
        factors = np.array([1.0] * 3 + [1e30] * 9, np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for name, array in stored(arch, config, state):
        writer.add_tensor(name, np.ascontiguousarray(array.astype(np.float32)))
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


@pytest.mark.parametrize("named", ["part 1", "part 2", "folder"])
def test_a_split_file_is_one_model(tmp_path: Path, named: str) -> None:
    family, fields, more = CASES["qwen3"]
    reference = Reference(tmp_path / "reference", family, 0, **{**BASE, **fields})
    folder = tmp_path / "model"
    folder.mkdir()
    config, state = reference.model.config, reference.model.state_dict()
    names = [f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):
        own = {key: state[key] for key in [*state][number::2]}
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(state)}
        write(folder / name, "qwen3", config, own, {**more, **split})
    path = {"part 1": folder / names[0], "part 2": folder / names[1], "folder": folder}[named]
    with LLM(path, dtype="float32") as llm:
        score = llm.score(prompt_token_ids=[prompts()[0]])[0]
    np.testing.assert_allclose(
        score.logprobs, reference.logprobs(prompts()[0]), rtol=1e-4, atol=1e-4
    )
    (folder / names[1]).rename(folder / "other")
    with pytest.raises(CheckpointError, match=f"{names[1]} is missing"):
        LLM(folder / names[0])


@pytest.mark.few(7)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *VARIANTS])
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    arch, family, fields, more = VARIANTS[name] if name in VARIANTS else (name, *CASES[name])
    if arch not in gguf.MODEL_ARCH_NAMES.values():
        pytest.skip(f"this version of gguf does not know {arch}")
    reference = Reference(tmp_path / "reference", family, 0, **{**BASE, **fields})
    path = tmp_path / "model.gguf"
    write(path, arch, reference.model.config, reference.model.state_dict(), more)
    with LLM(path, dtype="float32") as llm:
        scores = llm.score(prompt_token_ids=prompts())
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 8),
        ("attention.causal", False),
        ("expert_gating_func", 2),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("altup.num_inputs", 4),
        ("attention.head_count_kv", [2, 1, 2]),
    ],
)
def test_metadata_that_changes_the_model_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    family, fields, more = CASES["qwen3"]
    reference = Reference(tmp_path / "reference", family, 0, **{**BASE, **fields})
    path = tmp_path / "model.gguf"
    write(
        path,
        "qwen3",
        reference.model.config,
        reference.model.state_dict(),
        {**more, key: value},
    )
    with pytest.raises(CheckpointError, match=rf"qwen3\.{key} is .*, which is not supported"):
        LLM(path)
