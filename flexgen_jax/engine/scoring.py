"""Collects the heads' scores: log-probabilities of given tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from flexgen_jax.engine.requests import NOTHING, EncodedRequest
from flexgen_jax.progress import Amount


@dataclass(frozen=True)
class ScoreOutput:
    """Natural log-probabilities of a text's tokens, each given the tokens before it; the first
    token has none. greedy: whether each token would have been the greedy choice."""

    text: str | None
    token_ids: list[int]
    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True)
class PairScore:
    """A continuation's score after its context: its tokens, their natural log-probabilities, and
    whether every token is the greedy choice."""

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: bool

    @classmethod
    def of(cls, tokens: Sequence[int], logprobs: list[float], greedy: list[bool]) -> PairScore:
        """Returns the score of the last tokens that have log-probabilities."""
        count = len(tokens)
        return cls(list(tokens), logprobs[-count:], all(greedy[-count:]))

    @property
    def total(self) -> float:
        """The continuation's log-probability."""
        return fsum(self.logprobs)


def _wanted(request: EncodedRequest) -> int:
    """Returns how many of a request's tokens are to be scored."""
    return len(request.forced) + sum(token != NOTHING for token in request.scored)


class Scoring:
    """Collects log-probabilities of prompts, or of the tokens that are forced upon them."""

    def __init__(self) -> None:
        self._logprobs: dict[int, list[float]] = defaultdict(list)
        self._greedy: dict[int, list[bool]] = defaultdict(list)
        self._requests: list[EncodedRequest] = []

    def begin(self, requests: Sequence[EncodedRequest]) -> None:
        """Receives requests before they run."""
        self._requests = list(requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(logprobs) for logprobs in self._logprobs.values())

    def progress(self) -> Amount:
        """Returns how many tokens are scored."""
        total = sum(map(_wanted, self._requests))
        return Amount(self.num_tokens, total, len(self._logprobs))

    def receive(
        self, requests: Sequence[EncodedRequest], token: int, result: tuple[np.ndarray, np.ndarray]
    ) -> list[int]:
        """Takes the log-probabilities of a batch's tokens, fp32 [batch, token], and whether they
        are greedy choices; returns the rows of requests that are not finished. token: the number
        of the forced token."""
        for row, request in enumerate(requests):
            logprobs, greedy = (x[row] for x in result)
            forced = request.forced[token : token + 1]
            scored_tokens = forced or request.scored
            if scored_tokens:
                scored_positions = [
                    n for n, x in enumerate(scored_tokens, -len(scored_tokens)) if x != NOTHING
                ]
                self._logprobs[request.index] += logprobs[scored_positions].tolist()
                self._greedy[request.index] += greedy[scored_positions].tolist()
        return [row for row, r in enumerate(requests) if token + 1 < len(r.forced)]

    def restart(self) -> list[EncodedRequest]:
        """Returns the requests that are not finished, and drops what was collected for them."""
        unfinished = [r for r in self._requests if len(self._logprobs[r.index]) < _wanted(r)]
        for request in unfinished:
            self._logprobs.pop(request.index)
            self._greedy.pop(request.index, None)
        return unfinished

    def outputs(self, texts: Sequence[str | None]) -> list[ScoreOutput]:
        return [
            ScoreOutput(
                text,
                [*request.prompt_ids, *request.scored[-1:], *request.forced],
                self._logprobs[request.index],
                self._greedy[request.index],
            )
            for text, request in zip(texts, self._requests, strict=True)
        ]
