"""LLaMA's shape and a mixture of experts against NumPy: agreement that does not need PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from tests.helpers.models import prompts
from tests.helpers.numpy_llama import LLAMA, MIXTRAL, write


@pytest.mark.few(1)
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
