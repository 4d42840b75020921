"""Collects the heads' scores: log-probabilities of given tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.offload.batch import Batch, HeadResult
from flexgen_jax.policy.policy import SCORE, HeadUse
from flexgen_jax.progress import Amount
from flexgen_jax.requests.collector import Collector, batch_of, targets_of
from flexgen_jax.requests.requests import NOTHING, EncodedRequest


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


class Scoring(Collector):
    """Collects log-probabilities of prompts, or of the tokens that are forced upon them."""

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: dict[int, list[float]] = defaultdict(list)
        self._greedy: dict[int, list[bool]] = defaultdict(list)
        self._requests: list[EncodedRequest] = []

    def begin(self, requests: Sequence[EncodedRequest]) -> None:
        self._requests = list(requests)

    def head_of(self, requests: Iterable[EncodedRequest]) -> HeadUse:
        return SCORE

    def batch(self, config: ModelConfig, members: Sequence[EncodedRequest], rows: int) -> Batch:
        batch = batch_of(config, members, rows)
        if any(request.forced for request in members):
            forced = np.zeros((rows, max(r.max_tokens for r in members)), np.int32)
            for row, request in enumerate(members):
                forced[row, : len(request.forced)] = request.forced
            return replace(batch, forced=forced)
        branches = members[0].branches
        shape = rows, branches.total if branches else batch.prompt_len
        return replace(batch, targets=targets_of(members, shape), branches=branches)

    @property
    def num_tokens(self) -> int:
        return sum(len(logprobs) for logprobs in self._logprobs.values())

    def progress(self) -> Amount:
        total = sum(map(_wanted, self._requests))
        return Amount(self.num_tokens, total, len(self._logprobs))

    def receive(
        self, requests: Sequence[EncodedRequest], token: int, result: HeadResult
    ) -> list[int]:
        for row, request in enumerate(requests):
            logprobs, greedy = (x[row] for x in result.scores or ())
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
