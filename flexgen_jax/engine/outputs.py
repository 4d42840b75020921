"""Collects the heads' results: token ids into finished sequences, or scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flexgen_jax.engine.batching import EncodedRequest
from flexgen_jax.models.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class RequestOutput:
    """The continuation of one prompt.

    text: "" if the model has no tokenizer; token_ids: the new tokens, including an end token;
    finish_reason: "stop" for an end token or a stop string, "length" for the limit of tokens.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


OnOutput = Callable[[int, RequestOutput], object]


@dataclass(frozen=True)
class ScoreOutput:
    """Natural log-probabilities of a text's tokens, each given the tokens before it; the first
    token has none."""

    text: str | None
    token_ids: list[int]
    logprobs: list[float]


@dataclass
class _Sequence:
    request: EncodedRequest
    ids: list[int] = field(default_factory=list)
    text: str | None = None
    reason: FinishReason | None = None


class Generation:
    """Collects the tokens of requests until every request is finished.

    prompts: texts by the requests' indices; on_output: see `LLM.generate`.
    """

    def __init__(
        self,
        requests: Sequence[EncodedRequest],
        prompts: Sequence[str | None],
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        on_output: OnOutput | None = None,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._on_output = on_output
        self._sequences = {request.index: _Sequence(request) for request in requests}

    def receive(self, requests: Sequence[EncodedRequest], token: int, ids: np.ndarray) -> list[int]:
        """Takes a token of each request of a batch, int32 [batch, 1]; returns the rows of those
        that are not finished. token: the number of the token."""
        members = [self._sequences[request.index] for request in requests]
        for sequence, found in zip(members, ids[:, 0], strict=False):
            if sequence.reason is None:
                self._append(sequence, int(found))
        return [row for row, sequence in enumerate(members) if sequence.reason is None]

    def _append(self, sequence: _Sequence, token: int) -> None:
        params = sequence.request.params
        sequence.ids.append(token)
        if token in self._eos_ids and not params.ignore_eos:
            sequence.reason = "stop"
        elif params.stop and (text := self._until_stop(sequence)) is not None:
            sequence.text, sequence.reason = text, "stop"
        elif len(sequence.ids) >= sequence.request.max_tokens:
            sequence.reason = "length"
        if sequence.reason is not None and self._on_output is not None:
            self._on_output(sequence.request.index, self._output(sequence))

    def _until_stop(self, sequence: _Sequence) -> str | None:
        """Returns the text before the first stop string, or None if there is none yet."""
        text = self._decode(sequence.ids)
        found = [text.find(stop) for stop in sequence.request.params.stop]
        places = [place for place in found if place >= 0]
        return text[: min(places)] if places else None

    def _decode(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids)

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self._sequences.values())

    def restart(self, requests: Sequence[EncodedRequest]) -> list[EncodedRequest]:
        """Returns the requests that are not finished, and resets what was collected for them."""
        left = [r for r in requests if self._sequences[r.index].reason is None]
        for request in left:
            self._sequences[request.index] = _Sequence(request)
        return left

    def outputs(self) -> list[RequestOutput]:
        """Returns the results in the order of the requests."""
        return [self._output(sequence) for _, sequence in sorted(self._sequences.items())]

    def _output(self, sequence: _Sequence) -> RequestOutput:
        assert sequence.reason is not None, "the request is finished"
        return RequestOutput(
            prompt=self._prompts[sequence.request.index],
            prompt_token_ids=list(sequence.request.prompt_ids),
            text=self._decode(sequence.ids) if sequence.text is None else sequence.text,
            token_ids=sequence.ids,
            finish_reason=sequence.reason,
        )


class Scoring:
    """Collects log-probabilities of prompts, or of the tokens that are forced upon them."""

    def __init__(self) -> None:
        self._logprobs: dict[int, list[float]] = defaultdict(list)

    @property
    def num_tokens(self) -> int:
        return sum(len(logprobs) for logprobs in self._logprobs.values())

    def receive(
        self, requests: Sequence[EncodedRequest], token: int, logprobs: np.ndarray
    ) -> list[int]:
        """Takes the log-probabilities of a batch's tokens, fp32 [batch, token]; returns the rows
        of requests that are not finished. token: the number of the forced token."""
        for row, request in enumerate(requests):
            if token < len(request.forced):
                self._logprobs[request.index].append(float(logprobs[row, 0]))
            elif not request.forced:
                # Position t predicts token t + 1, so the last position scores nothing.
                count = len(request.prompt_ids)
                self._logprobs[request.index] = [float(x) for x in logprobs[row, -count:-1]]
        return [row for row, r in enumerate(requests) if token + 1 < len(r.forced)]

    def restart(self, requests: Sequence[EncodedRequest]) -> list[EncodedRequest]:
        """Returns the requests that are not finished, and resets what was collected for them."""
        left = [
            r
            for r in requests
            if len(self._logprobs[r.index]) < max(len(r.prompt_ids) - 1, len(r.forced))
        ]
        for request in left:
            self._logprobs.pop(request.index)
        return left

    def outputs(
        self, texts: Sequence[str | None], requests: Sequence[EncodedRequest]
    ) -> list[ScoreOutput]:
        return [
            ScoreOutput(text, [*request.prompt_ids, *request.forced], self._logprobs[request.index])
            for text, request in zip(texts, requests, strict=True)
        ]
