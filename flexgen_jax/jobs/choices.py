"""A finished choice in the journal of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexgen_jax.engine.outputs import RequestOutput, TokenLogprob
from flexgen_jax.engine.requests import Request


def done(result: RequestOutput) -> dict[str, Any]:
    """Returns a finished choice's entry for the journal; see `finished_choice`."""
    entry = {"tokens": result.token_ids, "text": result.text}
    entry |= {"finish_reason": result.finish_reason, "prompt": result.prompt_token_ids}
    return entry | logprobs_json(result.logprobs or [])


def logprobs_json(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"logprobs": [[x.logprob, x.top] for x in logprobs]} if logprobs else {}


def read_logprob(raw: Any) -> TokenLogprob:
    logprob, top = raw
    return TokenLogprob(logprob, tuple((token, other_logprob) for token, other_logprob in top))


def finished_choice(
    request: Request, record: Mapping[str, Any], logprobs: list[TokenLogprob]
) -> RequestOutput:
    """Returns a choice's result from the journal."""
    return RequestOutput(
        request.prompt,
        list(record["prompt"]),
        record["text"],
        list(record["tokens"]),
        record["finish_reason"],
        request.id,
        logprobs=None if request.sampling_params.logprobs is None else logprobs,
    )
