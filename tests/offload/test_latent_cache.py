"""What latent attention keeps: one compressed array a token, on every tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from tests.helpers.families import BASE, GLM, LATENT
from tests.helpers.models import byte_tokenizer

torch: Any = pytest.importorskip("torch")
LAYERS, PROMPT, NEW = 3, 16, 9


def saved(folder: Path) -> Path:
    """Saves a random model whose cache is as large as DeepSeek-V3's."""
    import transformers

    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV3Config(**BASE | GLM | LATENT | sizes)
    transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


def test_deepseek_v3_keeps_1152_bytes_a_token_and_layer() -> None:
    spec = model_spec(known_shape("deepseek-ai/DeepSeek-V3"))
    assert {2 * layer.row_size for layer in spec.decoders} == {1152}


@pytest.mark.parametrize(("bits", "each"), [(16, 1152), (4, 576 // 2 + 9 * 4)])
def test_a_run_writes_what_is_kept(tmp_path: Path, bits: int, each: int) -> None:
    """Of 16 tokens of a prompt, and of one full block of 8 more; in 4 bits with a scale and a
    minimum for each of 9 groups."""
    policy = Policy.from_percent(
        *(100, 0, 0, 0, 100, 0),
        **{"batch_size": 1, "kv_block_tokens": 8, "cache_bits": bits},
        attention="host",
    )
    ids = np.random.default_rng(0).integers(3, 96, PROMPT).tolist()
    with LLM(saved(tmp_path / "m"), policy=policy, offload_dir=tmp_path / "o") as llm:
        params = SamplingParams(max_tokens=NEW + 1, ignore_eos=True)
        llm.generate(prompt_token_ids=[ids], sampling_params=params)
        report = llm.report()
    assert report["bytes"]["disk_write"] == LAYERS * (PROMPT + 8) * each
