"""LLaMA's shape and a mixture of experts against NumPy: agreement that does not need PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.families import family_of, read_config
from flexgen_jax.models.spec import model_spec
from tests.helpers.models import byte_tokenizer, prompts
from tests.helpers.numpy_llama import NumpyLlama

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
}


def write(folder: Path, raw: dict[str, Any]) -> NumpyLlama:
    """Writes a folder with random weights."""
    folder.mkdir()
    config, rng = read_config(raw), np.random.default_rng(0)
    tensors = {}
    for spec in model_spec(config).tensors.values():
        name = family_of(config).stored(spec, config).name
        full = name if name.startswith("lm_head") else f"model.{name}"
        is_scale = spec.path.endswith("scale")
        tensors[full] = (rng.normal(0, 0.3, spec.shape) + is_scale).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return NumpyLlama(raw, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("raw", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_logits_and_tokens_are_numpys(tmp_path: Path, raw: dict[str, Any]) -> None:
    model = write(tmp_path / "m", raw)
    policy = Policy.from_percent(0, 50, 0, 50, 0, 100, batch_size=3, kv_block_tokens=4)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(tmp_path / "m", dtype="float32", policy=policy, offload_dir=tmp_path / "o") as llm:
        scores = llm.score(prompt_token_ids=prompts())
        found = llm.generate(prompt_token_ids=prompts(), sampling_params=params)
    for ids, score, result in zip(prompts(), scores, found, strict=True):
        np.testing.assert_allclose(score.logprobs, model.logprobs(ids), rtol=1e-4, atol=1e-5)
        assert result.token_ids == model.greedy(ids, 8)
