"""After warming up, a greedy run compiles nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from tests.helpers.families import BASE, EXPERTS
from tests.helpers.models import BASE as OPT
from tests.helpers.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("compiled_quickly")

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": OPT,
    "experts": BASE | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 8},
    "a shared expert": BASE
    | EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16},
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("dense", {"weight_bits": 4}),
        ("experts", {"prefill_chunk": 16}),
        ("experts", {"weight_bits": 4}),
        ("a shared expert", {}),
    ],
)
def test_a_greedy_run_compiles_nothing_after_warming_up(
    tmp_path: Path, name: str, policy: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    given = Policy(batch_size=3, kv_block_tokens=4, **policy)
    with LLM(tmp_path, dtype="float32", policy=given, dummy_weights=True) as llm:
        llm.warm_up(32, 7, 3)
        params = SamplingParams.plain(7)
        llm.generate(prompt_token_ids=[[5] * 32] * 3, sampling_params=params)
        assert llm.report()["compile_in_run_s"] == 0
