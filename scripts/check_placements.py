"""Compares every policy with the resident run, on whatever accelerator JAX finds.

Policies differ in placement, schedule, place of attention, width and sparsity; each is compared
with the resident run of equal width and sparsity. Prints a table; exits with 1 if any run's fp32
greedy tokens differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import numpy as np

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.policy.schedule import SCHEDULES

PLACEMENTS = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 100, 0),
    (30, 40, 20, 50, 0, 100),
)
FORMATS = tuple(product((16, 8, 4), (1.0,))) + tuple(product((16, 4), (0.2,)))
"""Pairs of the bits of weights and cache, and the fraction of tokens attended to."""


def policies() -> Iterator[dict[str, Any]]:
    """Yields the arguments in which policies differ from the resident run's."""
    for percent, schedule, overlap in product(PLACEMENTS, SCHEDULES, (True, False)):
        for attention in ("device", "host") if percent[2] < 100 else ("auto",):
            yield {
                "percent": percent,
                "schedule": schedule,
                "overlap": overlap,
                "attention": attention,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the small model of the package")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 60, 16)
    prompts = [rng.integers(4, 4000, n).tolist() for n in lengths]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)

    def run(policy: Policy, folder: str) -> tuple[list[list[int]], float]:
        options = {"policy": policy, "dtype": "float32", "offload_dir": folder}
        with LLM(args.model, **options) as llm:
            llm.generate(prompt_token_ids=prompts, sampling_params=params)
            results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
            return [r.token_ids for r in results], llm.report()["generation_throughput"]

    device = jax.devices()[0]
    print(f"{device.platform}: {device.device_kind}, jax {jax.__version__}")
    print(f"{'percent':24} schedule overlap attention bits sparsity  token/s  tokens")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for bits, sparsity in FORMATS:
            formats = {"weight_bits": bits, "cache_bits": bits, "attention_sparsity": sparsity}
            expected, _ = run(Policy(batch_size=16, **formats), folder)
            for changes in policies():
                shape = {"batch_size": 4, "num_batches": 4, **formats}
                percent = changes.pop("percent")
                policy = Policy.from_percent(*percent, **changes, **shape)
                found, speed = run(policy, folder)
                same = found == expected
                failed |= not same
                name = " ".join(map(str, percent))
                print(
                    f"{name:24} {policy.schedule:8} {policy.overlap!s:7} {policy.attention:9} "
                    f"{bits:4} {sparsity:8} {speed:8.1f}  {'equal' if same else 'DIFFERENT'}",
                    flush=True,
                )
    sys.exit(failed)


if __name__ == "__main__":
    main()
