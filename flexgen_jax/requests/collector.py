"""The purpose of a run: a collector forms batches of requests and collects the head's results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.offload.batch import Batch, HeadResult
from flexgen_jax.policy.policy import HeadUse
from flexgen_jax.progress import Amount
from flexgen_jax.requests.outputs import TokenLogprob
from flexgen_jax.requests.padding import pad_prompts
from flexgen_jax.requests.requests import EncodedRequest


class Collector(ABC):
    """Collects the results of requests: generated texts, or scores of given ones."""

    # Whether later requests may share prefixes that nobody named.
    may_share = False
    # The number of tokens of each finished request; None if there are many.
    texts: dict[EncodedRequest, int] | None
    # Called with requests that continue in another pass, see `EncodedRequest.later`.
    on_later: Callable[[Sequence[EncodedRequest]], object]
    # The log-probabilities of the token that was reported last.
    latest_logprob: TokenLogprob | None = None

    def __init__(self) -> None:
        self.texts = {}
        self.on_later = lambda requests: None

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """How many tokens were collected."""

    @abstractmethod
    def begin(self, requests: Sequence[EncodedRequest]) -> None:
        """Receives requests before they run."""

    @abstractmethod
    def head_of(self, requests: Iterable[EncodedRequest]) -> HeadUse:
        """Returns the most demanding use of the head by some requests."""

    @abstractmethod
    def batch(self, config: ModelConfig, members: Sequence[EncodedRequest], rows: int) -> Batch:
        """Returns the batch of some requests, padded to `rows` rows."""

    @abstractmethod
    def receive(
        self, requests: Sequence[EncodedRequest], token: int, result: HeadResult
    ) -> list[int]:
        """Takes the head's result for a batch's step, as NumPy arrays; returns the rows of requests
        that are not finished. token: the number of the generated token, from 0."""

    @abstractmethod
    def restart(self) -> list[EncodedRequest]:
        """Returns the unfinished requests, and drops what was collected for them."""

    @abstractmethod
    def progress(self) -> Amount:
        """Returns how many tokens are collected, of how many."""

    def adjustments(
        self, request: EncodedRequest, guesses: Sequence[int] = ()
    ) -> Sequence[Mapping[int, tuple[float, float]]]:
        """Returns the changes of a request's logits for the next token, and for those after each of
        some guesses; see `SamplingParams.adjustments`."""
        return [{}] * (1 + len(guesses))

    def allowed(
        self, request: EncodedRequest, guesses: Sequence[int] = ()
    ) -> Sequence[np.ndarray] | None:
        """Returns the allowed next tokens of a request, and after each draft token, see
        `Matcher.allowed`; None if all may."""
        return None

    def wanted(self, requests: list[EncodedRequest]) -> list[EncodedRequest]:
        """Returns those of some waiting requests that are still to be run."""
        return requests

    def unfinished(self) -> Iterator[tuple[str, list[int], list[TokenLogprob]]]:
        """Yields the id, the text's tokens and this run's log-probabilities of each unfinished
        request."""
        return iter(())

    def cancel(self, request_id: str) -> None:  # noqa: B027
        """Finishes a request early, if it can be; see `LLM.cancel`."""


def batch_of(
    config: ModelConfig, members: Sequence[EncodedRequest], rows: int, uncomputed: int = 0
) -> Batch:
    """Returns requests as a batch of prompts alone, left-padded to `rows` rows.

    uncomputed: how many of a text's tokens are never computed: 1 if its last token is only chosen.
    """
    ids, first_valid = pad_prompts(members, rows, config.pad_id, config.max_positions)
    fill = rows - len(members)
    lengths = [len(r.prompt_ids) + r.max_tokens - uncomputed for r in members] + [1] * fill
    before = [r.prefix_len for r in members] + [0] * fill
    adapters = np.array([r.adapter for r in members] + [-1] * fill, np.int32)
    return Batch(
        ids,
        first_valid,
        most=np.maximum(np.array(lengths, np.int32), 1),
        before=np.array(before, np.int32),
        adapters=adapters if config.adapter_names else None,
    )


def targets_of(members: Sequence[EncodedRequest], shape: tuple[int, int]) -> np.ndarray:
    """Returns the tokens to score after each of some prompts' tokens, int32 [rows, token]."""
    targets = np.zeros(shape, np.int32)
    for row, request in enumerate(members):
        if request.scored:
            targets[row, -len(request.scored) :] = np.maximum(request.scored, 0)
    return targets
