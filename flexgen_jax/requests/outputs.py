"""The results of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flexgen_jax.requests.requests import EncodedRequest, Request

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability, and the likeliest tokens' ids and log-probabilities."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The continuation of one prompt.

    text: "" if the model has no tokenizer; token_ids: the new tokens, including an end token;
    finish_reason: "stop" for an end token or a stop string, "length" for the limit of tokens,
    "cancelled" by `LLM.cancel`, "error" where the request was impossible; error says why; id: the
    request's; logprobs: those of its tokens, if it asked for them; others: the results of further
    texts, if it asked for several; prompt_logprobs: those of the prompt's tokens, None for the
    first token; embedding: the prompt's pooled hidden states, fp32 [hidden], if the request has a
    `pooling`; cached_tokens: how many of the prompt's first tokens were shared with other requests
    or stored, and so not computed for this one.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    id: str = ""
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    others: tuple[RequestOutput, ...] = ()
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: np.ndarray | None = None
    cached_tokens: int = 0


OnToken = Callable[[str, int], object]
OnFinished = Callable[[EncodedRequest, "RequestOutput"], object]
OnOutput = Callable[[int, RequestOutput], object]


def failed(request: Request, error: str) -> RequestOutput:
    """Returns the result of an impossible request."""
    prompt_ids = request.prompt_token_ids
    ids = [x for x in prompt_ids if isinstance(x, int)] if isinstance(prompt_ids, Sequence) else []
    return RequestOutput(request.prompt, ids, "", [], "error", str(request.id), error)
