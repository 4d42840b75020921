"""Requirements for models of every family: give another implementation's numbers, wherever
its data lie."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flexgen_jax.engine.llm import LLM
from flexgen_jax.models.loading import Model
from flexgen_jax.policy.policy import Policy
from flexgen_jax.requests.sampling import SamplingParams

LENGTHS = (3, 14, 8, 16, 5, 1)
"""Tokens of the prompts."""

NEW_TOKENS = 6

POLICIES = (
    Policy(batch_size=6),
    Policy.from_percent(0, 100, 0, 100, 0, 100, batch_size=2, num_batches=3, kv_block_tokens=4),
    Policy.from_percent(
        *(0, 0, 0, 0, 0, 0), batch_size=3, num_batches=2, prefill_chunk=7, kv_block_tokens=4
    ),
    Policy.from_percent(
        *(30, 40, 20, 50, 0, 100), batch_size=2, num_batches=2, attention="host", kv_block_tokens=4
    ),
)
"""Everything on the device, the host, the disk, and divided."""


def check_model(
    model: str | Path | Model,
    logits: Callable[[list[int]], np.ndarray],
    *,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> None:
    """Compares a model in fp32 with a second implementation, under several placements.

    model: as `LLM` takes it; a small one, of random weights that are not too small to matter.
    logits: returns the logits of all tokens of a sequence, [token, vocabulary].
    tolerance: the allowed relative difference of log-probabilities.
    seed: of the prompts.

    Raises `AssertionError` that says where they differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        prompts: list[list[int]] | None = None
        for policy in POLICIES:
            with LLM(model, dtype="float32", policy=policy, offload_dir=folder) as llm:
                if prompts is None:
                    draw = np.random.default_rng(seed)
                    vocabulary = llm.config.vocab_size
                    prompts = [draw.integers(1, vocabulary, n).tolist() for n in LENGTHS]
                _check(llm, prompts, logits, tolerance)


def _check(
    llm: LLM,
    prompts: list[list[int]],
    logits: Callable[[list[int]], np.ndarray],
    tolerance: float,
) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    for ids, result in zip(prompts, results, strict=True):
        expected_tokens, so_far = list[int](), [*ids]
        for _ in range(NEW_TOKENS):
            expected_tokens.append(int(np.argmax(np.asarray(logits(so_far))[-1])))
            so_far.append(expected_tokens[-1])
        place = f"after {ids}, {llm.policy}: tokens {result.token_ids}, and not {expected_tokens}"
        assert result.token_ids == expected_tokens, place
    longer = [ids for ids in prompts if len(ids) > 1]
    for ids, score in zip(longer, llm.score(prompt_token_ids=longer), strict=True):
        np.testing.assert_allclose(
            score.logprobs,
            _logprobs(np.asarray(logits(ids), np.float64), ids),
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"log-probabilities of {ids}, {llm.policy}",
        )


def _logprobs(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """Returns the log-probability of every token but the first."""
    shifted = logits - logits.max(-1, keepdims=True)
    table: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    token_logprobs: np.ndarray = table[np.arange(len(ids) - 1), ids[1:]]
    return token_logprobs
