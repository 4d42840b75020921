"""Checks that a model in stages makes the tokens of transformers, wherever each stage's data lies.

An OPT and a LLaMA of five layers, prompts and texts of different lengths, in fp32: two and four
stages under four placements. With 16 bits the tokens must be transformers', with 4 bits those of
one stage; no stage's tier may take more than was computed before. Stages are processes, so each of
the runs takes about ten seconds.

    python scripts/checks/check_stages.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from flexgen_jax import LLM, Policy, SamplingParams
from tests.helpers.families import NEW_TOKENS, Reference
from tests.helpers.models import PLACEMENTS, prompts

FAMILIES = ("opt", "llama")
LAYERS = 5


def tokens(folder: Path, stages: int, percent: tuple[int, ...], bits: int) -> list[list[int]]:
    """Returns every prompt's tokens; checks the peaks of all stages."""
    asked = prompts()
    params = [SamplingParams(1 + 5 * n % NEW_TOKENS, ignore_eos=True) for n in range(len(asked))]
    policy = Policy.from_percent(
        *percent,
        batch_size=2,
        num_batches=2,
        kv_block_tokens=4,
        weight_bits=bits,
        cache_bits=bits,
    )
    with (
        tempfile.TemporaryDirectory() as offload,
        LLM(folder, dtype="float32", policy=policy, offload_dir=offload, stages=stages) as llm,
    ):
        found = llm.generate(prompt_token_ids=asked, sampling_params=params)
        reports = llm.report().get("stages", [])
    for number, report in enumerate(reports):
        for tier, peak in report["peak_bytes"].items():
            if peak > report["computed_peak_bytes"][tier]:
                sys.exit(f"stage {number} took {peak} bytes of {tier}, more than computed")
    return [result.token_ids for result in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    wrong = 0
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            reference = Reference(folder, family, 0, num_hidden_layers=LAYERS)
            packed = tokens(folder, 1, PLACEMENTS[0], 4)
            whole = [row[: len(short)] for row, short in zip(reference.tokens, packed, strict=True)]
            for stages, percent, bits in product(args.stages, PLACEMENTS, (16, 4)):
                is_equal = tokens(folder, stages, percent, bits) == (packed if bits == 4 else whole)
                wrong += not is_equal
                said = "equal" if is_equal else "DIFFERENT"
                print(f"{family}, {stages} stages, {percent}, {bits} bits: {said}", flush=True)
    print(f"{wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
