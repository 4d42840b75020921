"""Every placement, schedule and width against the resident run of the same width, on whatever
accelerator JAX finds.

Prints a table; exits with 1 where any run's fp32 greedy tokens differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import product

import jax
import numpy as np

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.policy.policy import SCHEDULES

PLACEMENTS = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 100, 0),
    (30, 40, 20, 50, 0, 100),
)


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
    print(f"{'percent':28} {'schedule':8} {'overlap':7} {'bits':4} {'token/s':>8}  tokens")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for bits in (16, 8, 4):
            widths = {"weight_bits": bits, "cache_bits": bits}
            expected, _ = run(Policy(batch_size=16, **widths), folder)
            for percent, schedule, overlap in product(PLACEMENTS, SCHEDULES, (True, False)):
                shape = {"batch_size": 4, "num_batches": 4, **widths}
                policy = Policy.from_percent(*percent, schedule=schedule, overlap=overlap, **shape)
                found, speed = run(policy, folder)
                same = found == expected
                failed |= not same
                name = " ".join(map(str, percent))
                said = "equal" if same else "DIFFERENT"
                print(f"{name:28} {schedule:8} {overlap!s:7} {bits:4} {speed:8.1f}  {said}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
