"""Requests: what users ask for, and the same checked and as token ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any

from flexgen_jax.errors import PromptError, TooLongError, UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.policy.policy import GREEDY, SAMPLE, SAMPLE_AND_READ, HeadUse
from flexgen_jax.requests.grammar import Grammars
from flexgen_jax.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from flexgen_jax.layers.rotary import Branches
    from flexgen_jax.models.parts import Pooling

Prefix = str | Sequence[int]
"""The beginning of prompts, as a text or as token ids."""

MIN_PREFIX_TOKENS = 16
"""Prefixes of fewer tokens are not worth a pass of their own."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, for `LLM.stream`.

    id: names the request's result; no two requests that are not finished may have the same. prompt:
    a text, or else prompt_token_ids: its token ids. prefix: the text, or token ids, of a prefix
    shared with other prompts: instructions, or examples. Its KV cache is then computed and stored
    once for all prompts; it changes no result. continued: tokens of the text that an earlier run
    has made; the prompt continues after it. is_chat: whether the text answers a conversation, so
    that stop strings and `stop_token_ids` count after its reasoning only. place: a number that
    random draws follow from, with the seed; None is the request's place among all. pooling: makes a
    vector of the prompt, see `LLM.embed`; its text is then one meaningless token. adapter: the name
    of the LoRA adapter that computes it, None for the model itself.
    """

    id: str
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    prefix: Prefix | None = None
    continued: Sequence[int] = ()
    place: int | None = None
    is_chat: bool = False
    pooling: Pooling | None = None
    adapter: str | None = None


NOTHING = -1
"""Stands for a token that is not scored."""


@dataclass(frozen=True)
class EncodedRequest:
    """One sequence to continue.

    index: its place among the requests of a call; max_tokens: the new tokens that its parameters
    ask for, limited by the room in the model's context; forced: tokens to continue it with, in
    order to score them; scored: the tokens after each of the prompt's, if these are to be scored;
    id, prompt: as given; shared: the lengths of the prefixes that it shares with other requests,
    the shortest first; is_alone: whether it must share nothing; continued: how many of its last
    tokens are of the text, made by an earlier run; place: what its random draws follow from, None
    for the index; branches: the continuations at the prompt's end; `scored` then has the token
    after each of their tokens, and `NOTHING` for padding; later: tokens after `max_tokens`, for
    which the whole sequence is computed again, because longrope changes its frequencies there;
    is_chat: as given; at_once: the most tokens that a plan has room for before the request
    continues as another one, None for all; pooling: as given; adapter: the number of its adapter,
    -1 for none.
    """

    index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    forced: tuple[int, ...] = ()
    id: str = ""
    prompt: str | None = None
    shared: tuple[int, ...] = field(default=(), compare=False)
    is_alone: bool = field(default=False, compare=False)
    continued: int = 0
    place: int | None = None
    scored: tuple[int, ...] = ()
    branches: Branches | None = None
    later: int = 0
    is_chat: bool = False
    at_once: int | None = None
    pooling: Pooling | None = None
    adapter: int = -1

    @property
    def head(self) -> HeadUse:
        """What its text needs of the head."""
        if self.scored or self.pooling in ("mean", "cls"):
            return SAMPLE_AND_READ
        return GREEDY if self.params.is_plain else SAMPLE

    @property
    def whole_limit(self) -> int:
        """The most tokens of its text, those of an earlier run included."""
        return self.continued + self.max_tokens + self.later

    def going_on(self, generated: Sequence[int]) -> EncodedRequest:
        """Returns the request for the `later` tokens of a text, after its `generated` tokens."""
        count = self.later if self.at_once is None else min(self.later, self.at_once)
        return replace(
            self,
            prompt_ids=(*self.given_ids, *generated),
            continued=len(generated),
            max_tokens=count,
            later=self.later - count,
            shared=(),
            scored=(),
        )

    @property
    def draws_from(self) -> int:
        return self.index if self.place is None else self.place

    @property
    def given_ids(self) -> tuple[int, ...]:
        """The prompt without tokens of an earlier run."""
        return self.prompt_ids[: len(self.prompt_ids) - self.continued]

    @property
    def made_ids(self) -> tuple[int, ...]:
        """The tokens of an earlier run."""
        return self.prompt_ids[len(self.prompt_ids) - self.continued :]

    @property
    def prefix_len(self) -> int:
        """How many of the prompt's first tokens are shared."""
        return self.shared[-1] if self.shared else 0

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """The prefixes that it shares, the shortest first."""
        return [self.prompt_ids[:length] for length in self.shared]

    @property
    def own_ids(self) -> tuple[int, ...]:
        """The prompt after the shared prefix."""
        return self.prompt_ids[self.prefix_len :]


def copies(request: EncodedRequest, count: int) -> list[EncodedRequest]:
    """Returns a request as often as it asks for texts; count: the number of all requests. The first
    copy is the request itself; further copies have indices larger by multiples of `count`, which
    seed their draws."""
    copy_numbers = range(1, request.params.n)
    return [
        request,
        *(
            replace(
                request,
                index=request.index + n * count,
                id=f"{request.id}.{n}",
                place=request.draws_from + (n << 32),
                scored=(),
            )
            for n in copy_numbers
        ),
    ]


def shared_tokens(prompt: Sequence[int], prefix: Sequence[int]) -> tuple[int, ...]:
    """Returns how many tokens of a prefix a prompt shares, at least one short of the prompt, () if
    none.

    All tokens except the last, because in a text prefix the last token may merge with the following
    text.
    """
    count = min(len(prefix), len(prompt)) - 1
    is_whole = count >= MIN_PREFIX_TOKENS and count == len(prefix) - 1
    return (count,) if is_whole and list(prompt[:count]) == list(prefix[:count]) else ()


def common_length(rows: Sequence[Any]) -> int:
    """Returns how many elements all of some sequences begin with; there is at least one prompt."""
    one, other = min(rows), max(rows)  # all others are between these two
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_ids(ids: Sequence[int], index: int, config: ModelConfig) -> None:
    """Raises `PromptError` for token ids that the vocabulary has not."""
    invalid = [token for token in ids if not 0 <= token < config.vocab_size]
    if invalid:
        raise PromptError(
            f"prompt {index} has token id {invalid[0]}, but the vocabulary has only "
            f"{config.vocab_size} tokens",
            [index],
        )


def impossible(errors: Mapping[int, str]) -> PromptError:
    """Returns the error of prompts that cannot be continued. errors: the errors, by index."""
    number, error_text = next(iter(errors.items()))
    error_text = re.sub("^the prompt", f"prompt {number}", error_text)
    error_text = (
        error_text if error_text.startswith("prompt ") else f"prompt {number}: {error_text}"
    )
    others_note = f"; {len(errors) - 1} more prompts do not fit" if len(errors) > 1 else ""
    return PromptError(f"{error_text}{others_note}", list(errors))


def check_prompt(prompt: object) -> None:
    """Raises `UserError` for a prompt that is no text."""
    if isinstance(prompt, str):
        return
    is_ids = isinstance(prompt, Sequence) and all(isinstance(x, int) for x in prompt)
    hint = "; give token ids as prompt_token_ids=[...]" if is_ids else ""
    raise UserError(f"a prompt must be a string, not {type(prompt).__name__}{hint}")


def token_ids(ids: object) -> list[int]:
    """Returns token ids as Python's own integers; raises `UserError` otherwise."""
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise UserError(f"token ids must be a list of integers, not {ids!r}")
    checked = []
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise UserError(f"token ids must be integers, not {token!r}")
        checked.append(index(token))
    return checked


def check_params(params: SamplingParams, config: ModelConfig, grammars: Grammars | None) -> None:
    """Raises `UserError` for parameters that this model cannot follow: a bias of a token that the
    vocabulary has not, a schema that is wrong, or texts where it has no tokenizer. grammars: None
    without a tokenizer."""
    if params.schema is not None and grammars is not None:
        grammars.check(params.schema)
    if grammars is None and (params.stop or params.schema is not None):
        raise UserError("stop strings and JSON need a tokenizer, but this model has none")
    named = {"logit_bias": [token for token, _ in params.biases], "stop_token_ids": params.end_ids}
    for name, tokens in named.items():
        for token in tokens:
            if token >= config.vocab_size:
                raise UserError(
                    f"{name} has token id {token}, but the vocabulary has only "
                    f"{config.vocab_size} tokens"
                )


def check_lengths(rows: Sequence[Sequence[int]], max_new_tokens: int, config: ModelConfig) -> None:
    """Raises `PromptError` for prompts that are empty or leave no room for `max_new_tokens` new
    tokens."""
    max_length = config.max_positions - max_new_tokens
    bad_indices = [index for index, row in enumerate(rows) if not 1 <= len(row) <= max_length]
    if bad_indices:
        others_note = (
            f"; {len(bad_indices) - 1} more prompts do not fit" if len(bad_indices) > 1 else ""
        )
        raise PromptError(
            f"prompt {bad_indices[0]} has {len(rows[bad_indices[0]])} tokens; the model accepts 1 "
            f"to {max_length}{config.context_limit}{others_note}",
            bad_indices,
        )


Resolve = Callable[[SamplingParams, int], SamplingParams]
"""Sets the parameters that a request does not, given its prompt's number of tokens."""


class Encoder:
    """Checks requests and encodes their texts.

    shares: whether requests share a prefix; resolve: see `Resolve`; grammars: see `check_params`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        shares: bool,
        resolve: Resolve,
        grammars: Grammars | None,
    ) -> None:
        self._config, self._tokenizer, self._shares = config, tokenizer, shares
        self._resolve, self._grammars = resolve, grammars
        self._prefixes: dict[str, list[int]] = {}  # the latest one, since jobs have one

    def encode(
        self, request: Request, index: int, ids: Sequence[int] | None = None
    ) -> EncodedRequest:
        """Returns a request as token ids; raises `UserError` for an impossible one.

        index: its place among all; ids: its prompt's token ids, where they are known already.
        """
        if not isinstance(request.sampling_params, SamplingParams):
            raise UserError(
                f"sampling_params must be SamplingParams, not {request.sampling_params!r}"
            )
        if request.place is not None and request.place < 0:
            raise UserError(f"place must be at least 0, not {request.place}")
        config, earlier_ids = self._config, token_ids(request.continued)
        ids = self._ids(request) if ids is None else ids
        for token in [*ids, *earlier_ids]:
            if not 0 <= token < config.vocab_size:
                raise UserError(
                    f"token id {token} is outside the vocabulary of {config.vocab_size} tokens"
                )
        if not 1 <= len(ids) < config.max_positions:
            limit = config.max_positions - 1
            message = f"the prompt has {len(ids)} tokens; the model accepts 1 to {limit}"
            message += config.context_limit
            raise TooLongError(message, len(ids), limit) if ids else UserError(message)
        check_params(request.sampling_params, config, self._grammars)
        params = self._resolve(request.sampling_params, len(ids))
        room = min(params.most_tokens, config.max_positions - len(ids)) - len(earlier_ids)
        scored: tuple[int, ...] = ()
        if params.prompt_logprobs is not None:
            scored = (*ids[1:], *[NOTHING] * (1 + len(earlier_ids)))
        adapter = self._adapter(request.adapter)
        # All of the prompt's tokens go through the head, or its KV cache is the adapter's own.
        is_alone = bool(scored) or request.pooling in ("mean", "cls") or adapter >= 0
        prefix = () if is_alone or not self._shares else self._prefix(request.prefix)
        encoded = EncodedRequest(
            index=index,
            prompt_ids=(*ids, *earlier_ids),
            params=params,
            max_tokens=room,
            id=str(request.id),
            prompt=request.prompt,
            shared=shared_tokens(ids, prefix),
            is_alone=is_alone,
            scored=scored,
            pooling=request.pooling,
            continued=len(earlier_ids),
            place=request.place,
            is_chat=request.is_chat,
            adapter=adapter,
        )
        return divided(encoded, config.short_positions)

    def _adapter(self, name: str | None) -> int:
        """Returns the number of an adapter, -1 for None."""
        names = self._config.adapter_names
        if name is None or name in names:
            return -1 if name is None else names.index(name)
        known = f"the adapters are {', '.join(names)}" if names else "there are none with names"
        raise UserError(f"adapter {name!r} is not known: {known}")

    def _ids(self, request: Request) -> list[int]:
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise UserError("pass either prompt or prompt_token_ids")
        if request.prompt_token_ids is not None:
            return token_ids(request.prompt_token_ids)
        check_prompt(request.prompt)
        return self._encoded(str(request.prompt))

    def _encoded(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise UserError(
                "text prompts need a tokenizer, but this model has none: pass "
                "prompt_token_ids, or use `flexgen-jax bench` to measure speed"
            )
        return self._tokenizer.encode(text, max_tokens=self._config.max_positions)

    def _prefix(self, prefix: Prefix | None) -> Sequence[int]:
        if not isinstance(prefix, str):
            return prefix if isinstance(prefix, tuple) else token_ids(prefix or ())
        if prefix not in self._prefixes:
            self._prefixes = {prefix: self._encoded(prefix)}
        return self._prefixes[prefix]


def divided(request: EncodedRequest, border: int | None) -> EncodedRequest:
    """Returns a request that pauses when its sequence exceeds `border` tokens, and continues later.

    With a border of 64 and a prompt of 50, the first 15 tokens follow from 50 to 64 tokens; the
    next request continues from 65.
    """
    first = 0 if border is None else border + 1 - len(request.prompt_ids)
    if not 0 < first < request.max_tokens:
        return request
    return replace(request, max_tokens=first, later=request.max_tokens - first)


def in_steps(request: EncodedRequest, at_once: int) -> EncodedRequest:
    """Returns a request that makes up to `at_once` tokens, and continues as another one. So a plan
    need not have room for a limit that most texts do not reach."""
    count = min(request.max_tokens, at_once)
    later = request.later + request.max_tokens - count
    return replace(request, max_tokens=count, later=later, at_once=at_once)
