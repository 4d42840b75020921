"""Compares every policy with the resident run, on whatever accelerator JAX finds.

    python scripts/checks/check_placements.py [--copies] [--quick]

Policies differ in placement, schedule, place of attention, width and sparsity; each is compared
with the resident run of equal width and sparsity. Prints a table; exits with 1 if any run's fp32
greedy tokens differ. With --copies, a CPU copies between host and device as a GPU does.
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

from flexgen_jax import LLM, Policy, SamplingParams, set_up_jax
from flexgen_jax.policy.schedules import SCHEDULES

PLACEMENTS = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 100, 0),
    (30, 40, 20, 50, 0, 100),
)
QUICK = (PLACEMENTS[1], PLACEMENTS[2], PLACEMENTS[5])
FORMATS = {
    "16": (16, 1.0),
    "8": (8, 1.0),
    "4": (4, 1.0),
    "sparse-16": (16, 0.2),
    "sparse-4": (4, 0.2),
}
"""By name, the bits of weights and cache, and the fraction of tokens attended to."""


def policies(is_quick: bool) -> Iterator[dict[str, Any]]:
    """Yields the policy arguments that differ from the resident run's."""
    placements, overlaps = (QUICK, (True,)) if is_quick else (PLACEMENTS, (True, False))
    for percent, schedule, overlap in product(placements, SCHEDULES, overlaps):
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
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--quick", action="store_true", help="Half of the placements, overlapped.")
    parser.add_argument("--copies", action="store_true", help="A CPU copies as a GPU does.")
    args = parser.parse_args()
    set_up_jax()
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 60, 16)
    prompts = [rng.integers(4, 4000, n).tolist() for n in lengths]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)

    def run(policy: Policy, folder: str) -> tuple[list[list[int]], float]:
        options = {"policy": policy, "dtype": "float32", "offload_dir": folder}
        options["unified"] = False if args.copies else None
        with LLM(args.model, **options) as llm:
            llm.generate(prompt_token_ids=prompts, sampling_params=params)
            results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
            return [r.token_ids for r in results], llm.report()["generation_throughput"]

    device = jax.devices()[0]
    print(f"{device.platform}: {device.device_kind}, jax {jax.__version__}")
    print(f"{'percent':24} schedule overlap attention bits sparsity  token/s  tokens")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for bits, sparsity in (FORMATS[name] for name in args.formats):
            formats = {"weight_bits": bits, "cache_bits": bits, "attention_sparsity": sparsity}
            expected, _ = run(Policy(batch_size=16, **formats), folder)
            for changes in policies(args.quick):
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
