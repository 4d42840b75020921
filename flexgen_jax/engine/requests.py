"""Requests: what users ask for, and the same checked and as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flexgen_jax.engine.grammar import Grammars
from flexgen_jax.engine.sampling import SamplingParams
from flexgen_jax.errors import PromptError, UserError
from flexgen_jax.layers.rotary import Branches
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.tokenizer import Tokenizer

Prefix = str | Sequence[int]
"""The beginning of prompts, as a text or as token ids."""

LEAST_PREFIX = 16
"""Prefixes of fewer tokens are not worth a pass of their own."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, for `LLM.stream`.

    id: names the request's result; no two requests that are not finished may have the same.
    prompt: a text, or else prompt_token_ids: its token ids. prefix: the text, or the token ids,
    with which this prompt begins like others: instructions, or examples. Where it does, the KV
    cache of these tokens is computed and kept once for all of them; it changes no result.
    continued: tokens of the text that an earlier run has made; the text goes on after them. place:
    a number that random draws follow from, with the seed; None is the request's place among all.
    """

    id: str
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    prefix: Prefix | None = None
    continued: Sequence[int] = ()
    place: int | None = None


NOTHING = -1
"""In place of a token where none is scored."""


@dataclass(frozen=True)
class EncodedRequest:
    """One sequence to continue.

    index: its place among the requests of a call; max_tokens: the new tokens that its parameters
    ask for, limited by the room in the model's context; forced: tokens to continue it with, in
    order to score them; scored: the tokens after each of the prompt's, if these are to be scored;
    id, prompt: as given; prefix_len: how many of the prompt's first tokens are
    a prefix that other requests share; continued: how many of its last tokens are of the text, made
    by an earlier run; place: what its random draws follow from, None for the index; branches: what
    the prompt ends with, in which case `scored` has the tokens after each of theirs, and `NOTHING`
    after padding.
    """

    index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    forced: tuple[int, ...] = ()
    id: str = ""
    prompt: str | None = None
    prefix_len: int = 0
    continued: int = 0
    place: int | None = None
    scored: tuple[int, ...] = ()
    branches: Branches | None = None

    @property
    def draws_from(self) -> int:
        return self.index if self.place is None else self.place

    @property
    def given_ids(self) -> tuple[int, ...]:
        """The prompt without what an earlier run has made of the text."""
        return self.prompt_ids[: len(self.prompt_ids) - self.continued]

    @property
    def made_ids(self) -> tuple[int, ...]:
        """What an earlier run has made of the text."""
        return self.prompt_ids[len(self.prompt_ids) - self.continued :]

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.prompt_ids[: self.prefix_len]

    @property
    def own_ids(self) -> tuple[int, ...]:
        """The prompt after the prefix."""
        return self.prompt_ids[self.prefix_len :]


def copies(request: EncodedRequest, count: int) -> list[EncodedRequest]:
    """Returns a request as often as it asks for texts; count: the number of all requests. The first
    one is itself, the indices of the others are larger by multiples of `count`, and their draws
    follow from these numbers."""
    others = range(1, request.params.n)
    return [
        request,
        *(
            replace(
                request,
                index=request.index + n * count,
                id=f"{request.id}.{n}",
                place=request.draws_from + (n << 32),
            )
            for n in others
        ),
    ]


def shared_tokens(prompt: Sequence[int], prefix: Sequence[int]) -> int:
    """Returns how many tokens of a prefix a prompt shares, at least one short of the prompt.

    It is all of them but the last, which as a text may be one with what follows, or none.
    """
    count = min(len(prefix), len(prompt)) - 1
    is_whole = count >= LEAST_PREFIX and count == len(prefix) - 1
    return count if is_whole and list(prompt[:count]) == list(prefix[:count]) else 0


def common_length(rows: Sequence[Any]) -> int:
    """Returns how many elements all of some sequences begin with; there is at least one of them."""
    one, other = min(rows), max(rows)  # all others are between these two
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_ids(ids: Sequence[int], index: int, config: ModelConfig) -> None:
    """Raises `PromptError` for token ids that the vocabulary has not."""
    bad = [token for token in ids if not 0 <= token < config.vocab_size]
    if bad:
        raise PromptError(
            f"prompt {index} has token id {bad[0]}; the vocabulary has {config.vocab_size}",
            [index],
        )


def check_params(params: SamplingParams, config: ModelConfig, grammars: Grammars | None) -> None:
    """Raises `UserError` for parameters that this model cannot follow: a bias of a token that the
    vocabulary has not, a schema that is wrong, or texts where it has no tokenizer. grammars: None
    without a tokenizer."""
    if params.schema is not None and grammars is not None:
        grammars.check(params.schema)
    if grammars is None and (params.stop or params.schema is not None):
        raise UserError("stop strings and JSON need a tokenizer, and this model has none")
    for token, _ in params.biases:
        if token >= config.vocab_size:
            raise UserError(
                f"logit_bias has token id {token}; the vocabulary has {config.vocab_size}"
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
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    shares: bool,
    resolved: Callable[[SamplingParams], SamplingParams],
    grammars: Grammars | None,
) -> Callable[[Request, int], EncodedRequest]:
    """Returns a function that checks and encodes a request, given its index; it raises `UserError`
    for an impossible one.

    shares: whether requests share a prefix; resolved: sets the parameters that a request does not;
    grammars: see `check_params`.
    """
    known: dict[str, list[int]] = {}

    def encode(request: Request, index: int) -> EncodedRequest:
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise UserError("give either prompt or prompt_token_ids")
        params = resolved(request.sampling_params)
        has_text = request.prompt is not None or isinstance(request.prefix, str)
        if tokenizer is None and has_text:
            raise UserError("texts need a tokenizer, and this model has none")
        if request.prompt is not None and tokenizer is not None:
            ids = tokenizer.encode(request.prompt)
        else:
            ids = [int(token) for token in request.prompt_token_ids or ()]
        made = [int(token) for token in request.continued]
        check_params(params, config, grammars)
        if params.n > 1:
            raise UserError("n is for generate and chat; give a stream the request n times")
        for token in [*ids, *made]:
            if not 0 <= token < config.vocab_size:
                raise UserError(f"token id {token}; the vocabulary has {config.vocab_size}")
        if not 1 <= len(ids) < config.max_positions:
            raise UserError(
                f"the prompt has {len(ids)} tokens; the model takes 1 to {config.max_positions - 1}"
            )
        most = room_for(ids, params, config) - len(made)
        prefix = known.get(request.prefix) if isinstance(request.prefix, str) else request.prefix
        if prefix is None and isinstance(request.prefix, str) and tokenizer is not None:
            known.clear()
            prefix = known[request.prefix] = tokenizer.encode(request.prefix)
        shared = shared_tokens(ids, prefix or ()) if shares else 0
        named = (str(request.id), request.prompt, shared, len(made), request.place)
        return EncodedRequest(index, (*ids, *made), params, most, (), *named)

    return encode
