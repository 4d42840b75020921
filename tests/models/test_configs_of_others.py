"""Configs as others write them: windows and rotary embeddings are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy
from flexgen_jax.layers.rotary import frequencies
from flexgen_jax.models.families import read_config
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.shapes import known_shape, raw_shape
from flexgen_jax.requests.requests import PromptError, check_lengths
from tests.helpers.families import EXPERTS
from tests.helpers.models import byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "head_dim": 8,
    "pad_token_id": 1,
}
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 6.0, 8.0]}

CASES: dict[str, dict[str, Any]] = {
    "mistral with kinds of layers": {
        "model_type": "mistral",
        "sliding_window": 7,
        "layer_types": [FULL, SLIDING, FULL, SLIDING],
    },
    "mistral without a window": {"model_type": "mistral"},
    "mistral with null": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
    "qwen2 of experts": {
        "model_type": "qwen2_moe",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 3,
        **EXPERTS,
    },
    "qwen3 of experts": {
        "model_type": "qwen3_moe",
        "use_sliding_window": True,
        "sliding_window": 5,
        **EXPERTS,
    },
    "a share of plain embeddings": {"model_type": "llama", "partial_rotary_factor": 0.5},
    "a share in an object": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "a share of scaled embeddings": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, **YARN},
    },
    "both spellings": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "mixtral without a theta": {"model_type": "mixtral"},
    "phi3 whose longrope is yarn": {
        "model_type": "phi3",
        "original_max_position_embeddings": 24,
        "rope_scaling": {"type": "yarn", **LONG},
    },
    "gemma3 flat": {"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 500.0}},
    "gemma3 old": {
        "model_type": "gemma3_text",
        "rope_theta": 2e5,
        "rope_local_base_freq": 3e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3 with a pattern": {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    "gemma3 with a private pattern": {"model_type": "gemma3_text", "_sliding_window_pattern": 2},
}


def their_model(folder: Path, raw: dict[str, Any]) -> Any:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", CASES)
def test_windows_and_angles_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    raw = SIZES | CASES[name]
    ours, theirs = read_config(raw), their_model(tmp_path, raw)
    embedding, config = theirs.model.rotary_emb, theirs.config
    types = getattr(config, "layer_types", None) or [
        SLIDING if getattr(config, "sliding_window", None) else FULL
    ] * len(ours.pattern)
    for index, kind in zip(ours.pattern, types, strict=True):
        attention = ours.kinds[index].attention
        assert attention.window == (config.sliding_window if kind == SLIDING else None)
        assert attention.rotary is not None
        own = getattr(embedding, f"{kind}_inv_freq", None)
        expected = embedding.inv_freq if own is None else own
        found = frequencies(attention.rotary)[0]
        assert found == pytest.approx(np.asarray(expected), rel=1e-5), kind


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_of_another_kind_is_refused(field: dict[str, Any]) -> None:
    raw = SIZES | {"model_type": "llama"} | field
    with pytest.raises(ConfigError, match=next(iter(field))):
        read_config(raw)
    with pytest.raises(ConfigError, match="beta_slow"):
        read_config(SIZES | {"model_type": "llama", "rope_scaling": YARN | {"beta_slow": 0}})


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("jamba", "the closest family, mixtral, lacks layers with a recurrent state"),
        ("bloom", "the closest family, opt, lacks ALiBi"),
        ("qwen9", "the closest is qwen"),
    ],
)
def test_unsupported_types_are_refused_with_what_is_missing(model_type: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(SIZES | {"model_type": model_type})


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_local_experts", "n_routed_experts"])
def test_absurd_counts_are_refused_at_once(name: str) -> None:
    raw = {"model_type": "mixtral", name: 10**9}
    with pytest.raises(ConfigError, match=f"{name} is 1000000000, but at most"):
        read_config(raw)
    with pytest.raises(ConfigError, match=f"{name} is 1000000000, but at most"):
        read_config({"model_type": "qwen3_vl", "text_config": raw})


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "INT8_SQ"])
def test_published_variants_that_are_not_read_are_named(algorithm: str) -> None:
    """These multiply the inputs of a product by factors."""
    options = {"quant_method": "modelopt", "quant_algo": algorithm}
    with pytest.raises(ConfigError, match=f"quant_algo {algorithm}, which is not supported"):
        read_config({"model_type": "llama", "quantization_config": options})


def test_contexts_beyond_an_index_are_refused_with_the_reason() -> None:
    config = known_shape("deepseek-ai/DeepSeek-V3.2")
    assert config.max_positions == 2048
    with pytest.raises(PromptError, match=r"accepts 1 to 2000, index_topk: .* indexer"):
        check_lengths([[5] * 2001], 48, config)


def test_a_model_that_sees_generates_text(tmp_path: Path) -> None:
    """Its text part has a prefix, and its config is within another one."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(**SIZES, initializer_range=0.3)
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    ids = [5, 9, 30, 44, 7, 61]
    with torch.inference_mode():
        table = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    with LLM(tmp_path, dtype="float32", policy=Policy(batch_size=1)) as llm:
        ours = llm.score(prompt_token_ids=[ids])[0].logprobs
        assert any("vision_tower" in note for note in llm.notes)
    assert ours == pytest.approx([table[n, t].item() for n, t in enumerate(ids[1:])], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size_per_layer_input": 256}, "E2B and E4B"),
        ({"num_kv_shared_layers": 10}, "E2B and E4B"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ],
)
def test_what_gemma_4_has_beyond_is_refused(change: dict[str, Any], said: str) -> None:
    """Tokens of pictures that see each other do not occur, so "vision" is no other model."""
    raw = {**raw_shape("google/gemma-4-31B-it"), "use_bidirectional_attention": "vision"}
    read_config(raw)
    with pytest.raises(ConfigError, match=said):
        read_config({**raw, **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["linear_attention", "mamba"] * 32}, "layer_types"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_num_value_heads": 17}, "linear_num_value_heads"),
    ],
)
def test_what_qwen_3_5_has_not_is_refused(change: dict[str, Any], said: str) -> None:
    raw = raw_shape("Qwen/Qwen3.5-27B")
    with pytest.raises(ConfigError, match=said):
        read_config({**raw, **change})
