"""Families beyond the contract: 16 bits, long texts, and branches of a context."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexgen_jax import LLM, Policy, SamplingParams
from tests.helpers.families import NEW_TOKENS, VARIANTS, Reference
from tests.helpers.models import prompts

PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda family, n: Reference(root / f"{family}-{n}", family, n))


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("family", VARIANTS)
def test_every_family_runs_in_16_bits(
    references: Callable[[str, int], Reference], family: str, variant: int
) -> None:
    """XLA's CPU backend takes products of bfloat16 in some orders of axes only."""
    policy = Policy(batch_size=4, num_batches=2, kv_block_tokens=8)
    with LLM(references(family, variant).folder, dtype="bfloat16", policy=policy) as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS)
        scores = llm.score(prompt_token_ids=prompts())
    assert all(len(result.token_ids) == NEW_TOKENS for result in results)
    assert all(np.isfinite(score.logprobs).all() for score in scores)


def test_longrope_has_frequencies_for_long_sequences(tmp_path: Path) -> None:
    """A text of more tokens than in training is scored with other frequencies than a short one."""
    reference = Reference(tmp_path, "phi3", 0)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 96, count).tolist() for count in (60, 20, 45)]
    with LLM(tmp_path, dtype="float32", policy=Policy(batch_size=2)) as llm:
        scores = llm.score(prompt_token_ids=texts)
    for ids, score in zip(texts, scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=2e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt_oss", "smollm3"])
def test_branches_of_a_context_are_scored(
    references: Callable[[str, int], Reference], family: str
) -> None:
    """Sinks take part once for each token, whatever its keys come from; layers without positions
    have none in any of them."""
    reference, context = references(family, 0), [7, 9, 11, 13, 15, 17, 19, 21, 23, 30]
    ends = [[40], [41, 42], [43, 44, 45]]
    policy = Policy(batch_size=2, num_batches=2, prefill_chunk=6, kv_block_tokens=4)
    with LLM(reference.folder, dtype="float32", policy=policy) as llm:
        pairs = llm.score_pairs([context] * 3, ends)
    for continuation, pair in zip(ends, pairs, strict=True):
        wanted = reference.logprobs([*context, *continuation])[-len(continuation) :].sum()
        assert sum(pair.logprobs) == pytest.approx(wanted, rel=1e-4)
