"""One measured run on random prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexgen_jax.config import UserError
from flexgen_jax.engine import LLM
from flexgen_jax.sampling import SamplingParams


def run_bench(
    llm: LLM, prompt_len: int, gen_len: int, num_sequences: int | None, seed: int
) -> dict[str, Any]:
    """Generates `gen_len` tokens after random prompts of `prompt_len`; returns the report.

    num_sequences None is one block of the policy.
    """
    llm.config.check_lengths(prompt_len, gen_len)
    if num_sequences is not None and num_sequences < 1:
        raise UserError(f"--num-sequences must be positive, not {num_sequences}")
    count = num_sequences or llm.block_sequences(prompt_len, gen_len)
    llm.warm_up(prompt_len, gen_len, count)
    generator = np.random.default_rng(seed)
    prompts = generator.integers(0, llm.config.vocab_size, (count, prompt_len)).tolist()
    llm.generate(
        prompt_token_ids=prompts,
        sampling_params=SamplingParams(max_tokens=gen_len, ignore_eos=True),
    )
    return llm.report()
