"""What transformers computes of a family, this package computes, wherever the data lie.

Each family has a case of a covering array of placements; those with other caches than keys and
values also have chunks, prefixes and guesses. A slow run tries several cases for both variants of
a family's config, and `scripts/checks/check_families.py` many more.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.contract import ALL_AXES, PLACEMENT_AXES, Case, Contract, cases
from tests.helpers.families import VARIANTS, Reference

ALL_AT_ONCE = Case(
    weights=(30, 40),
    cache=(30, 40),
    activations=(30, 40),
    chunk=16,
    prefix="found",
    has_draft=True,
    has_mixed_lengths=True,
)
"""Sinks, compressed caches and recurrent states meet all of these."""


ONE_AFTER_THE_OTHER = Case(
    weights=(30, 40),
    activations=(0, 0),
    schedule="zigzag",
    loads="ondemand",
    batches=1,
    loses="bits",
)
"""Prompts of a second batch group meet the head's buffers, which the first one has filled."""

EXPERTS_ON_HOST = Case(
    weights=(0, 60), unified=False, host_experts=0.5, batches=1, has_mixed_lengths=True
)
"""The CPU computes experts where they lie, also those that are read from disk, for two rows and
then for one."""

WITH_EXPERTS = [
    family
    for family, (_, variants) in VARIANTS.items()
    if any("expert" in field or field.startswith("moe_") for field in variants[0])
]


def family_cases() -> list[Any]:
    def named(name: object, family: str, variant: int, case: Case, *marks: Any) -> Any:
        return pytest.param(family, variant, case, id=f"{family}-{variant}-{name}", marks=marks)

    quick = zip(VARIANTS, cycle(cases(PLACEMENT_AXES)), strict=False)
    slow = (
        named(seed, *given, case, pytest.mark.slow)
        for seed in (1, 2)
        for given, case in zip(
            ((family, variant) for family in VARIANTS for variant in (0, 1)),
            cycle(cases(ALL_AXES, seed)),
            strict=False,
        )
    )
    on_host = (
        named("host", family, 0, EXPERTS_ON_HOST, *[pytest.mark.slow] * (number % 4 > 0))
        for number, family in enumerate(WITH_EXPERTS)
    )
    other_modules = zip(("gemma4", "deepseek_v2"), cases(PLACEMENT_AXES, seed=1), strict=False)
    other_caches = ("gpt_oss", "deepseek_v3", "qwen3_5", "lfm2")
    return [
        *(named("placed", family, 0, case) for family, case in quick),
        *(named("placed", family, 1, case) for family, case in other_modules),
        *(named("all", family, 0, ALL_AT_ONCE) for family in other_caches),
        named("groups", "qwen3", 0, ONE_AFTER_THE_OTHER),
        *on_host,
        *slow,
    ]


@pytest.mark.parametrize(("family", "variant", "case"), family_cases())
def test_logits_and_tokens_are_those_of_transformers(
    family: str, variant: int, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(tmp_path / "model", family, variant)
    Contract(reference, has_logprobs=True).check(case, tmp_path / "offload", monkeypatch)
