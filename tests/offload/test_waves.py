"""Texts of different lengths: rows that are finished leave their batches, and others enter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.policy.schedules import SCHEDULES
from tests.helpers.cases import pairwise
from tests.helpers.models import PROMPT_LENGTHS, assert_within_plan, prompts
from tests.helpers.numpy_opt import reference

PLACEMENTS = [
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (30, 40, 20, 50, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (0, 50, 40, 0, 0, 0),
]
LENGTHS = PROMPT_LENGTHS * 2
TOKENS = [1 + 7 * n % 17 for n in range(len(LENGTHS))]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in TOKENS]


def generate(folder: Path, offload: Path, policy: Policy, unified: bool) -> list[list[int]]:
    with LLM(folder, dtype="float32", policy=policy, offload_dir=offload, unified=unified) as llm:
        found = llm.generate(prompt_token_ids=prompts(LENGTHS), sampling_params=PARAMS)
        report = llm.report()
    assert_within_plan(report)
    assert not list((offload / "runs").glob("*/*")) if (offload / "runs").exists() else True
    return [result.token_ids for result in found]


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[[], Path]) -> list[list[int]]:
    model = reference(checkpoint())
    rows = zip(prompts(LENGTHS), TOKENS, strict=True)
    return [model.greedy(ids, count) for ids, count in rows]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("percent", "schedule", "overlap", "num_batches", "unified", "attention"),
    pairwise(PLACEMENTS, list(SCHEDULES), [True, False], [1, 3], [True, False], ["device", "host"]),
)
def test_tokens_are_those_of_each_text_alone(
    checkpoint: Callable[[], Path],
    expected: list[list[int]],
    tmp_path: Path,
    percent: tuple[int, ...],
    schedule: str,
    overlap: bool,
    num_batches: int,
    unified: bool,
    attention: str,
) -> None:
    policy = Policy.from_percent(
        *percent,
        batch_size=8 if num_batches == 1 else 5,
        num_batches=num_batches,
        schedule=schedule,
        overlap=overlap,
        attention=attention,
        kv_block_tokens=4,
    )
    assert generate(checkpoint(), tmp_path, policy, unified) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("percent", [PLACEMENTS[1], PLACEMENTS[3]])
@pytest.mark.parametrize("sparsity", [1.0, 0.3])
@pytest.mark.parametrize("unified", [True, False])
def test_packed_and_sparse_caches_shrink_too(
    checkpoint: Callable[[], Path],
    tmp_path: Path,
    percent: tuple[int, ...],
    sparsity: float,
    unified: bool,
) -> None:
    """The tokens are those of a run in which each text is by itself."""
    policy, alone = (
        Policy.from_percent(
            *percent,
            batch_size=rows,
            cache_bits=4,
            kv_block_tokens=4,
            attention="host",
            attention_sparsity=sparsity,
        )
        for rows in (8, 1)
    )
    found = generate(checkpoint(), tmp_path / "together", policy, unified)
    assert found == generate(checkpoint(), tmp_path / "alone", alone, unified)
