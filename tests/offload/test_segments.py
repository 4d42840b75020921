"""Prompts of different lengths in a batch: what is padding in all of some rows is left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.policy import plan
from tests.helpers.models import prompts
from tests.helpers.numpy_llama import LLAMA, MIXTRAL, write

LENGTHS = (75, 40, 3, 20, 60, 77, 1, 38)
TOKENS = 6


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many segments each batch had; however small, they are worth compiling."""
    found, real = [], plan.segments_of

    def segments_of(padding: list[int], worth: int, together: int) -> Any:
        segments = real(padding, 0, min(together, 2))
        found.append(len(segments))
        return segments

    monkeypatch.setattr(plan, "segments_of", segments_of)
    return found


@pytest.mark.parametrize(
    ("raw", "percent", "options"),
    [
        (LLAMA, (100, 0, 100, 0, 100, 0), {"kv_block_tokens": 16}),
        (LLAMA, (0, 0, 0, 0, 0, 0), {"attention": "host", "kv_block_tokens": 16}),
        (MIXTRAL, (0, 50, 0, 50, 0, 100), {"attention": "device", "kv_block_tokens": 16}),
    ],
    ids=["llama", "llama-from-disk", "mixtral"],
)
def test_logits_and_tokens_are_numpys(
    compiled: list[int],
    tmp_path: Path,
    raw: dict[str, Any],
    percent: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    model, asked = write(tmp_path / "m", raw), prompts(LENGTHS)
    policy = Policy.from_percent(*percent, batch_size=8, **options)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    open_llm = partial(LLM, tmp_path / "m", dtype="float32", policy=policy)
    with open_llm(offload_dir=tmp_path / "o") as llm:
        found = llm.generate(prompt_token_ids=asked, sampling_params=params)
        report = llm.report()
        scores = llm.score(prompt_token_ids=[ids for ids in asked if len(ids) > 1])
    for ids, result in zip(asked, found, strict=True):
        assert result.token_ids == model.greedy(ids, TOKENS)
    for ids, score in zip((x for x in asked if len(x) > 1), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, model.logprobs(ids), rtol=1e-4, atol=1e-5)
    assert max(compiled) > 2
    assert report["prompt_tokens"] <= report["padded_prompt_tokens"] < 8 * 80
