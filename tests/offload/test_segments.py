"""Prompts of different lengths in a batch: what is padding in all of some rows is left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.layers.rotary import Branches
from flexgen_jax.offload.batch import Batch
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


@pytest.mark.few(1)
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


def test_contexts_with_branches_leave_out_padding_of_theirs_alone(
    compiled: list[int], tmp_path: Path
) -> None:
    """Of seven contexts in two batches, one row is padding."""
    model, rng = write(tmp_path / "m", LLAMA), np.random.default_rng(0)
    contexts = [rng.integers(3, 96, n).tolist() for n in (70, 66, 40, 68, 41, 69, 39)]
    asked = [(c, rng.integers(3, 96, 1 + n).tolist()) for c in contexts for n in range(3)]
    policy = Policy(batch_size=4, num_batches=2)
    with LLM(tmp_path / "m", dtype="float32", policy=policy) as llm:
        found = llm.score_pairs(*map(list, zip(*asked, strict=True)))
    for (context, continuation), score in zip(asked, found, strict=True):
        expected = model.logprobs([*context, *continuation])[-len(continuation) :]
        np.testing.assert_allclose(score.logprobs, expected, rtol=1e-4, atol=1e-4)
    assert max(compiled) > 1


def test_rows_that_are_padding_count_as_the_one_before_them() -> None:
    ids, most = np.zeros((4, 32), np.int32), np.array([40, 40, 1, 1])
    first = np.array([9, 3, 31, 31])
    assert Batch(ids, first, most=most).padding == [9, 3, 3, 3]
    assert Batch(ids, first).padding == [9, 3, 31, 31]
    assert Batch(ids, first, branches=Branches(3, 8)).padding == [7, 3, 7, 7]
