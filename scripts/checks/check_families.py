"""Checks model families against transformers, everywhere their data can lie.

For both variants of each family, greedy tokens in fp32 must be transformers' with weights, cache
and hidden states in each tier alone and in a covering array of mixtures, with the policy that is
found for little device memory, under four placements, two schedules and both places of attention,
and with guessed tokens, some of them wrong, under the four placements. With weights and cache in 4
bits they must be equal under the four placements, both schedules and both places.

    python scripts/checks/check_families.py [--tiers-only] [--variants 0 1] [--family FAMILY ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.engine import drafting
from flexgen_jax.offload.speculation import Pace
from tests.helpers.drafts import Scripted
from tests.helpers.families import NEW_TOKENS, VARIANTS, Reference
from tests.helpers.models import PLACEMENTS, TIER_PLACEMENTS, prompts

WAYS = list(product(PLACEMENTS, ("zigzag", "continuous"), ("device", "host")))
HAS_ONE_MEMORY = jax.devices()[0].platform == "cpu"
"""Whether host and device can share memory: then two runs of three do, and others copy."""

PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def generated(folder: Path, policy: Policy | str, unified: bool, **options: Any) -> list[list[int]]:
    """Returns the tokens of every prompt; unified: where the machine has one memory."""
    with (
        tempfile.TemporaryDirectory() as offload,
        LLM(
            folder,
            dtype="float32",
            policy=policy,
            offload_dir=offload,
            unified=HAS_ONE_MEMORY and unified,
            **options,
        ) as llm,
    ):
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS)
    return [result.token_ids for result in results]


def tokens(folder: Path, bits: int) -> Iterator[list[list[int]]]:
    """Yields the tokens of every prompt, for each way to place and schedule."""
    for number, (percent, schedule, attention) in enumerate(WAYS):
        policy = Policy.from_percent(
            *percent,
            batch_size=4,
            num_batches=2,
            kv_block_tokens=4,
            schedule=schedule,
            attention=attention,
            weight_bits=bits,
            cache_bits=bits,
        )
        yield generated(folder, policy, number % 3 > 0)


def by_tiers(folder: Path) -> Iterator[list[list[int]]]:
    """Yields the tokens of every prompt for each placement of `TIER_PLACEMENTS`, with one memory
    and with copies, and for a policy that is searched."""
    for number, percent in enumerate(TIER_PLACEMENTS):
        policy = Policy.from_percent(*percent, batch_size=4, num_batches=2, kv_block_tokens=4)
        yield generated(folder, policy, number % 2 > 0)
    host_only = Policy.from_percent(0, 100, 0, 100, 0, 100, batch_size=2)
    yield generated(folder, host_only, True)
    yield generated(folder, "auto", True, device_memory="60MB")


def with_guesses(folder: Path, reference: Reference) -> Iterator[list[list[int]]]:
    """Yields the tokens of every prompt with drafts, every fifth draft wrong, for each
    placement."""
    texts = [[*p, *ids] for p, ids in zip(prompts(), reference.tokens, strict=True)]
    drafting.LookupDrafter = lambda: Scripted(texts, wrong=5)  # type: ignore[assignment, misc]
    Pace.count = lambda pace: pace.most  # type: ignore[method-assign]
    for number, (percent, count) in enumerate(zip(PLACEMENTS, (1, 2, 4, 8), strict=True)):
        policy = Policy.from_percent(*percent, batch_size=3, num_batches=2, kv_block_tokens=4)
        options = {"draft": "lookup", "draft_tokens": count}
        yield generated(folder, policy, number % 2 > 0, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--variants", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--tiers-only", action="store_true", help="no schedules, guesses, 4 bits")
    options = parser.parse_args()
    wrong = 0
    for family, variant in product(options.family, options.variants):
        with tempfile.TemporaryDirectory() as folder:
            reference = Reference(Path(folder), family, variant)
            tiers = [found == reference.tokens for found in by_tiers(Path(folder))]
            wrong += tiers.count(False)
            summary = f"{sum(tiers)} of {len(tiers)} placements by tiers"
            print(f"{family} {variant}: {summary} give transformers' tokens", flush=True)
            if options.tiers_only:
                continue
            plain = [found == reference.tokens for found in tokens(Path(folder), 16)]
            guesses = with_guesses(Path(folder), reference)
            guessed = [found == reference.tokens for found in guesses]
            packed = list(tokens(Path(folder), 4))
        equal = [found == packed[0] for found in packed]
        wrong += plain.count(False) + guessed.count(False) + equal.count(False)
        print(
            f"{family} {variant}: {sum(plain)} of {len(plain)} ways give transformers' tokens, "
            f"so do {sum(guessed)} of {len(guessed)} with guesses, "
            f"{sum(equal)} of {len(equal)} give equal ones with 4 bits",
            flush=True,
        )
    print(f"{wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
