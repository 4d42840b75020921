"""Perplexity of a text that is longer than a model's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum

from flexgen_jax.engine.llm import LLM
from flexgen_jax.errors import UserError


@dataclass(frozen=True)
class Perplexity:
    """tokens: how many were scored; logprob: the sum of their natural log-probabilities."""

    tokens: int
    logprob: float

    @property
    def value(self) -> float:
        """exp of the mean negative log-probability of a token."""
        return exp(-self.logprob / self.tokens)


def windows(ids: Sequence[int], size: int, stride: int) -> list[tuple[list[int], int]]:
    """Cuts tokens into windows of at most `size` tokens, `stride` tokens apart.

    Returns each window with the number of its last tokens that are scored: all but the first token
    in the first window, and only new tokens in later windows. So each token but the first is scored
    once, with `size - stride` or more tokens before it, but for the first ones. Raises `UserError`
    for a stride that leaves tokens out.
    """
    if not 1 <= stride < size:
        raise UserError(f"--stride must be from 1 to {size - 1} tokens, not {stride}")
    ranges, end = list[tuple[list[int], int]](), 1
    for begin in range(0, len(ids), stride):
        window = list(ids[begin : begin + size])
        count = begin + len(window) - end
        if count:
            ranges.append((window, count))
        end = begin + len(window)
        if end == len(ids):
            break
    return ranges


def perplexity(llm: LLM, ids: Sequence[int], size: int | None, stride: int | None) -> Perplexity:
    """Returns the perplexity of a text's tokens, its beginning token included.

    size: tokens of a window, by default one more than the model's context, since the last token is
    only scored; stride: by default half a window.
    """
    max_window = llm.config.max_positions + 1
    size = max_window if size is None else size
    if not 2 <= size <= max_window:
        raise UserError(f"--window must be from 2 to {max_window} tokens, not {size}")
    cut = windows(ids, size, max(1, size // 2) if stride is None else stride)
    if not cut:
        raise UserError("the text is too short; it needs at least two tokens")
    scores = llm.score(prompt_token_ids=[window for window, _ in cut])
    pairs = zip(scores, (count for _, count in cut), strict=True)
    logprobs = [x for score, count in pairs for x in score.logprobs[-count:]]
    return Perplexity(len(logprobs), fsum(logprobs))
