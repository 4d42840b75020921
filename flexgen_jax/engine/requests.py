"""Requests: what users ask for, and the same checked and as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexgen_jax.engine.sampling import SamplingParams
from flexgen_jax.errors import PromptError, UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """A prompt to continue, for `LLM.stream`.

    id: names the request's result; no two requests that are not finished may have the same.
    prompt: a text, or else prompt_token_ids: its token ids.
    """

    id: str
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class EncodedRequest:
    """One sequence to continue.

    index: its place among the requests of a call, from which its random draws follow; max_tokens:
    the new tokens that its parameters ask for, limited by the room in the model's context; forced:
    tokens to continue it with, in order to score them; id, prompt: as given.
    """

    index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    forced: tuple[int, ...] = ()
    id: str = ""
    prompt: str | None = None


def check_ids(ids: Sequence[int], index: int, config: ModelConfig) -> None:
    """Raises `PromptError` for token ids that the vocabulary has not."""
    bad = [token for token in ids if not 0 <= token < config.vocab_size]
    if bad:
        raise PromptError(
            f"prompt {index} has token id {bad[0]}; the vocabulary has {config.vocab_size}",
            [index],
        )


def check_lengths(rows: Sequence[Sequence[int]], new: int, config: ModelConfig) -> None:
    """Raises `PromptError` for prompts that are empty or leave no room for `new` new tokens."""
    most = config.max_positions - new
    bad = [index for index, row in enumerate(rows) if not 1 <= len(row) <= most]
    if bad:
        others = f"; {len(bad) - 1} more prompts do not fit" if len(bad) > 1 else ""
        raise PromptError(
            f"prompt {bad[0]} has {len(rows[bad[0]])} tokens; the model takes 1 to {most}{others}",
            bad,
        )


def room_for(prompt: Sequence[int], params: SamplingParams, config: ModelConfig) -> int:
    """Returns the new tokens that a prompt may have."""
    return min(params.max_tokens, config.max_positions - len(prompt))


def encoder(
    config: ModelConfig, tokenizer: Tokenizer | None
) -> Callable[[Request, int], EncodedRequest]:
    """Returns a function that checks and encodes a request, given its index; it raises `UserError`
    for an impossible one."""

    def encode(request: Request, index: int) -> EncodedRequest:
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise UserError("give either prompt or prompt_token_ids")
        params = request.sampling_params
        if tokenizer is None and (request.prompt is not None or params.stop):
            raise UserError("texts and stop strings need a tokenizer, and this model has none")
        if request.prompt is not None and tokenizer is not None:
            ids = tokenizer.encode(request.prompt)
        else:
            ids = [int(token) for token in request.prompt_token_ids or ()]
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise UserError(f"token id {token}; the vocabulary has {config.vocab_size}")
        if not 1 <= len(ids) < config.max_positions:
            raise UserError(
                f"the prompt has {len(ids)} tokens; the model takes 1 to {config.max_positions - 1}"
            )
        most = room_for(ids, params, config)
        named = (str(request.id), request.prompt)
        return EncodedRequest(index, tuple(ids), params, most, (), *named)

    return encode
