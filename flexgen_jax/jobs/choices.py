"""A finished choice in the journal of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flexgen_jax.requests.outputs import RequestOutput, TokenLogprob
from flexgen_jax.requests.requests import Request


def done(result: RequestOutput) -> dict[str, Any]:
    """Returns a finished choice's entry for the journal; see `finished_choice`."""
    entry: dict[str, Any] = {"tokens": result.token_ids, "text": result.text}
    entry |= {"finish_reason": result.finish_reason, "prompt": result.prompt_token_ids}
    entry["cached"] = result.cached_tokens
    if result.prompt_logprobs is not None:
        entry["prompt_logprobs"] = [x and _logprob_json(x) for x in result.prompt_logprobs]
    if result.embedding is not None:
        entry["embedding"] = result.embedding.tolist()
    return entry | logprobs_json(result.logprobs or [])


def logprobs_json(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"logprobs": list(map(_logprob_json, logprobs))} if logprobs else {}


def _logprob_json(logprob: TokenLogprob) -> list[Any]:
    return [logprob.logprob, logprob.top]


def read_logprob(raw: Any) -> TokenLogprob:
    logprob, top = raw
    return TokenLogprob(logprob, tuple((token, other_logprob) for token, other_logprob in top))


def finished_choice(
    request: Request, record: Mapping[str, Any], logprobs: list[TokenLogprob]
) -> RequestOutput:
    """Returns a choice's result from the journal."""
    of_prompt, states = record.get("prompt_logprobs"), record.get("embedding")
    if of_prompt is not None:
        of_prompt = [x and read_logprob(x) for x in of_prompt]
    return RequestOutput(
        prompt=request.prompt,
        prompt_token_ids=list(record["prompt"]),
        text=record["text"],
        token_ids=list(record["tokens"]),
        finish_reason=record["finish_reason"],
        id=request.id,
        logprobs=None if request.sampling_params.logprobs is None else logprobs,
        prompt_logprobs=of_prompt,
        embedding=None if states is None else np.array(states, np.float32),
        cached_tokens=record.get("cached", 0),
    )
