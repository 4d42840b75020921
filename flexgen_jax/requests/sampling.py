"""How the next token is chosen and when a sequence ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite
from typing import Any, cast

import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.models.defaults import RULES, SamplingDefaults
from flexgen_jax.requests.grammar import schema_text

MAX_LOGPROBS = 20
"""Maximum number of tokens whose log-probabilities are returned in addition to the chosen one's."""

DEFAULT_TOKENS = 32
"""New tokens where neither a request nor the model's folder says how many."""

FORCED = 1e9
"""Added to the logit of a forced token."""

MIN_ADJUSTED_LOGITS = 16
"""Rows adjust a power of two of logits, this or more, so that few programs are compiled."""

SAMPLER_FIELDS = ("temperature", "top_k", "top_p", "min_p")
"""Parameters of random choices."""

BANS = ("min_tokens", *RULES[1:])
"""Parameters that ban or force tokens."""


def parameter(default: Any, **facts: Any) -> Any:
    """A field of `SamplingParams` with its facts.

    whole or real: the least and the largest integer or number, None for no limit; is_ids: whether
    it is a list of token ids; in_requests: whether JSON requests have it under its own name, and
    lm-eval's tasks; text: the help of its flag, if it has one.
    """
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Raises `ValueError` that names the parameter.

    None means the model folder's default (generation_config.json), or no effect without one. A
    request that sets the temperature ignores the folder's top_k, top_p and min_p. The random draws
    depend only on `seed` and on the request's position in the call. Logits are changed in the order
    repetition_penalty, presence and frequency penalties, logit_bias, as in transformers and in
    OpenAI's API.
    """

    # Maximum number of new tokens; 32 if the folder does not say.
    max_tokens: int | None = parameter(None, whole=(1, None))
    # 0 is greedy.
    temperature: float | None = parameter(
        None,
        real=(0.0, 1e6),
        in_requests=True,
        text="0: greedy. Default: the model's default, or 0.",
    )
    top_k: int | None = parameter(
        None,
        whole=(0, 2**31 - 1),
        in_requests=True,
        text="Sample from the K most likely tokens; 0: all. Default: the model's default.",
    )
    top_p: float | None = parameter(
        None,
        real=(0.0, 1.0),
        in_requests=True,
        text="Sample from the most likely tokens with this total probability. Default: the model's "
        "default.",
    )
    # These strings end a sequence and are not part of its text.
    stop: Sequence[str] = ()
    seed: int = parameter(0, whole=(None, None), in_requests=True)
    # Whether the end token does not end a sequence.
    ignore_eos: bool = parameter(False, in_requests=True)
    # A share of the likeliest token's probability.
    min_p: float | None = parameter(None, real=(0.0, 1.0), in_requests=True)
    # Minimum number of tokens before an end token.
    min_tokens: int | None = parameter(None, whole=(0, None), in_requests=True)
    # Subtracted from the logits of tokens in the completion: once, and once per occurrence.
    presence_penalty: float = parameter(0.0, real=(-2.0, 2.0), in_requests=True)
    frequency_penalty: float = parameter(0.0, real=(-2.0, 2.0), in_requests=True)
    # Divides the positive logits of tokens in the prompt or completion, and multiplies others.
    repetition_penalty: float | None = parameter(None, real=(1e-3, 1e3), in_requests=True)
    # Added to the logits of single tokens, by id.
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    # Returns each token's log-probability before these changes, and those of this number of most
    # likely tokens.
    logprobs: int | None = parameter(None, whole=(0, MAX_LOGPROBS))
    # The text is JSON of this schema, an object or JSON text; `max_tokens` may still cut it off.
    # Where the prompt ends with "<think>", the JSON begins after "</think>".
    json_schema: Mapping[str, Any] | str | None = parameter(None, in_requests=True)
    # Returns the log-probability of each token of the prompt but the first, and those of this
    # number of most likely tokens.
    prompt_logprobs: int | None = parameter(None, whole=(0, MAX_LOGPROBS), in_requests=True)
    # Number of completions of the prompt, in `LLM.generate` and `LLM.chat`.
    n: int = parameter(1, whole=(1, None))
    # Tokens that end a text as the end token does, with `ignore_eos`, too.
    stop_token_ids: Sequence[int] = parameter((), is_ids=True, in_requests=True)
    # No n-gram of this length repeats in prompt and completion.
    no_repeat_ngram_size: int | None = parameter(None, whole=(0, None), in_requests=True)
    # Forbidden sequences of tokens, forbidden tokens, and forbidden first tokens.
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = parameter(None, is_ids=True)
    begin_suppress_tokens: Sequence[int] | None = parameter(None, is_ids=True)
    # Forced as the last token within `max_tokens`.
    forced_eos_token_id: int | Sequence[int] | None = parameter(None, is_ids=True)

    def __post_init__(self) -> None:
        for name, value in _normalized(self).items():
            object.__setattr__(self, name, value)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
            if self.min_tokens or self.ignore_eos or self.stop:
                conflicting = "min_tokens, ignore_eos or stop"
                raise ValueError(
                    "json_schema determines the end of a completion and cannot be combined with "
                    f"{conflicting}"
                )
        for entry in fields(self):
            if "whole" in entry.metadata and getattr(self, entry.name) is not None:
                _check_integer(entry.name, getattr(self, entry.name), *entry.metadata["whole"])
        if (self.min_tokens or 0) > self.most_tokens and self.max_tokens is not None:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        for entry in fields(self):
            minimum, upper = entry.metadata.get("real", (0.0, 0.0))
            value = getattr(self, entry.name) if "real" in entry.metadata else None
            if value is not None and not (_is_number(value) and minimum <= value <= upper):
                raise ValueError(
                    f"{entry.name} must be from {minimum:g} to {upper:g}, not {value!r}"
                )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        for token, bias in self.biases:
            _check_integer("a token id in logit_bias", token, 0)
            if not (_is_number(bias) and -100 <= bias <= 100):
                raise ValueError(f"logit_bias must be from -100 to 100, not {bias!r}")
        for name in _names("is_ids"):
            for token in getattr(self, name) or ():
                _check_integer(f"a token id in {name}", token, 0)
        for row in self.bad_words_ids or ():
            if not row:
                raise ValueError("bad_words_ids must not contain an empty list")
            for token in row:
                _check_integer("a token id in bad_words_ids", token, 0)

    @classmethod
    def plain(cls, max_tokens: int) -> SamplingParams:
        """The likeliest tokens up to a number, whatever the model's folder asks for."""
        return cls(
            max_tokens,
            temperature=0.0,
            ignore_eos=True,
            min_tokens=0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            bad_words_ids=(),
            suppress_tokens=(),
            begin_suppress_tokens=(),
            forced_eos_token_id=(),
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        assert isinstance(self.stop_token_ids, tuple), "made so at the beginning"
        return self.stop_token_ids

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or the default where nobody says."""
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def schema(self) -> str | None:
        """`json_schema` as JSON."""
        assert self.json_schema is None or isinstance(self.json_schema, str), "made so before"
        return self.json_schema

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Pairs of `logit_bias`."""
        assert isinstance(self.logit_bias, tuple), "made so at the beginning"
        return self.logit_bias

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn, rather than the likeliest ones taken."""
        return bool(self.temperature)

    @property
    def is_adjusted(self) -> bool:
        """Whether logits of single tokens are changed."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.logit_bias)
        is_penalised = self.repetition_penalty not in (None, 1)
        return bool(is_penalised or any(penalties) or any(getattr(self, name) for name in BANS))

    @property
    def is_plain(self) -> bool:
        """Whether sampling is plain greedy decoding."""
        asks = self.logprobs is not None or self.json_schema is not None
        return not (self.is_sampled or self.is_adjusted or asks)

    def with_defaults(self, defaults: SamplingDefaults, prompt_len: int = 0) -> SamplingParams:
        """Returns parameters that are all set. Who sets the temperature chooses without the
        folder's top_k, top_p and min_p. prompt_len: tokens of the prompt, which a folder's
        max_length and min_length count."""
        if self.temperature is not None:
            defaults = replace(
                defaults, temperature=self.temperature, top_k=0, top_p=1.0, min_p=0.0
            )
        wishes = {name: getattr(defaults, name) for name in (*SAMPLER_FIELDS, *RULES)}
        wishes["max_tokens"] = defaults.max_tokens or DEFAULT_TOKENS
        if defaults.max_length is not None:
            if defaults.max_length <= prompt_len and self.max_tokens is None:
                raise UserError(
                    f"the prompt has {prompt_len} tokens, but generation_config.json limits "
                    f"prompt and completion to max_length {defaults.max_length}; set max_tokens"
                )
            wishes["max_tokens"] = max(1, defaults.max_length - prompt_len)
        wishes["min_tokens"] = max(defaults.min_tokens, defaults.min_length - prompt_len)
        if self.json_schema is not None or self.ignore_eos:
            wishes["min_tokens"] = 0
        values = {name: getattr(self, name) for name in wishes}
        resolved = {name: wishes[name] if x is None else x for name, x in values.items()}
        resolved["min_tokens"] = min(resolved["min_tokens"], resolved["max_tokens"])
        stop = self.stop or (() if self.json_schema is not None else defaults.stop)
        return replace(self, **resolved, stop=stop)

    def adjustments(
        self,
        prompt: Sequence[int],
        generated: Sequence[int],
        eos_ids: Sequence[int],
        max_tokens: int | None = None,
    ) -> dict[int, tuple[float, float]]:
        """Returns the factor and the addend of each logit that is changed for the next token; see
        `layers.sampling.adjust`. generated: the tokens of the text so far; max_tokens: the most it
        may have, None for no limit."""
        factors: dict[int, float] = {}
        added: defaultdict[int, float] = defaultdict(float)
        if self.repetition_penalty not in (None, 1):
            factors = dict.fromkeys({*prompt, *generated}, self.repetition_penalty or 1.0)
        if self.presence_penalty or self.frequency_penalty:
            for token, times in Counter(generated).items():
                added[token] -= self.presence_penalty + times * self.frequency_penalty
        for token, bias in self.biases:
            added[token] += bias
        for token in self._banned(prompt, generated, eos_ids):
            added[token] = -inf
        if self.forced_eos_token_id and len(generated) + 1 == max_tokens:
            for token in cast("Sequence[int]", self.forced_eos_token_id):
                added[token] = FORCED
        return {token: (factors.get(token, 1.0), added[token]) for token in {*factors, *added}}

    def _banned(
        self, prompt: Sequence[int], generated: Sequence[int], eos_ids: Sequence[int]
    ) -> Iterator[int]:
        """Yields the tokens that may not come next."""
        if len(generated) < (self.min_tokens or 0):
            yield from () if self.ignore_eos else eos_ids
            yield from self.end_ids
        yield from self.suppress_tokens or ()
        if not generated:
            yield from self.begin_suppress_tokens or ()
        size = self.no_repeat_ngram_size
        if size:
            yield from _repeating(np.array([*prompt, *generated], np.int64), size)
        for *before, last in self.bad_words_ids or ():
            is_end = not before and last in eos_ids  # as in transformers
            latest = [*prompt, *generated][-len(before) :] if before else []
            if latest == before and not is_end:
                yield last


def _names(fact: str) -> tuple[str, ...]:
    """Returns the names of the parameters with a fact."""
    return tuple(entry.name for entry in fields(SamplingParams) if fact in entry.metadata)


IN_REQUESTS = _names("in_requests")
"""Parameters that JSON requests and lm-eval's tasks have under the same name."""


def _repeating(ids: np.ndarray, size: int) -> list[int]:
    """Returns the tokens that would make a sequence of `size` tokens come again after `ids`.

    With [5, 6, 7, 5, 6] and 3, it is 7: 5, 6, 7 is there already, and 5, 6 is the end.
    """
    if len(ids) < size:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, size)
    ending = ids[len(ids) + 1 - size :]
    last: list[int] = windows[(windows[:, :-1] == ending).all(axis=1), -1].tolist()
    return last


def _normalized(params: SamplingParams) -> dict[str, Any]:
    """Returns all parameters as Python's own numbers and tuples, and with None where a parameter
    may be left out as its default."""
    checked: dict[str, Any] = {f.name: _python(getattr(params, f.name)) for f in fields(params)}
    for name, default in {f.name: f.default for f in fields(params)}.items():
        checked[name] = default if checked[name] is None else checked[name]
    stop = checked["stop"]
    checked["stop"] = (stop,) if isinstance(stop, str) else _listed("stop", stop)
    biases = checked["logit_bias"]
    pairs = biases.items() if isinstance(biases, Mapping) else _listed("logit_bias", biases)
    try:
        checked["logit_bias"] = tuple(sorted((_python(i), _python(bias)) for i, bias in pairs))
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, not {biases!r}") from None
    for name in _names("is_ids"):
        ids = [checked[name]] if isinstance(checked[name], int) else checked[name]
        checked[name] = None if ids is None else _listed(name, ids)
    rows = checked["bad_words_ids"]
    if rows is not None:
        rows = _listed("bad_words_ids", rows)
        checked["bad_words_ids"] = tuple(_listed("bad_words_ids", row) for row in rows)
    return checked


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """Returns a list's elements as Python's own; raises `ValueError` unless it is a list."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list, not {value!r}")
    return tuple(map(_python, value))


def _python(value: Any) -> Any:
    """Returns a scalar of NumPy as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _check_integer(name: str, value: Any, minimum: int | None, maximum: int | None = None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and (minimum is None or value >= minimum) and (maximum is None or value <= maximum):
        return
    limits = "" if minimum is None else f" of at least {minimum}"
    limits = limits if maximum is None else f" from {minimum} to {maximum}"
    raise ValueError(f"{name} must be an integer{limits}, not {value!r}")


def sampling_arrays(
    params: Sequence[SamplingParams], places: Sequence[int], starts: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Returns the arguments of `layers.sampling.sample` for a batch but for the logits and the
    token, or () if all rows are greedy.

    places, starts: for each row the inputs of its random key, with its seed, and the number of
    tokens so far.
    """
    if not any(p.is_sampled for p in params):
        return ()
    keys = [
        np.random.SeedSequence([p.seed & (2**64 - 1), place]).generate_state(2, np.uint32)
        for p, place in zip(params, places, strict=True)
    ]
    return (
        np.array([p.temperature or 0 for p in params], np.float32),
        np.array([p.top_k or 0 for p in params], np.int32),
        np.array([1 if p.top_p is None else p.top_p for p in params], np.float32),
        np.array([p.min_p or 0 for p in params], np.float32),
        np.stack(keys),
        np.array(starts, np.int32),
    )


def adjusting_arrays(rows: Sequence[Mapping[int, tuple[float, float]]]) -> tuple[np.ndarray, ...]:
    """Returns the arguments of `layers.sampling.adjust` but for the logits, from each row's
    `SamplingParams.adjustments`."""
    width = max(
        MIN_ADJUSTED_LOGITS, *(1 << (len(row) - 1).bit_length() if row else 0 for row in rows), 0
    )
    ids = np.full((len(rows), width), np.iinfo(np.int32).max, np.int32)  # of no vocabulary
    factor, added = np.ones(ids.shape, np.float32), np.zeros(ids.shape, np.float32)
    for number, row in enumerate(rows):
        for column, (token, (times, plus)) in enumerate(row.items()):
            ids[number, column] = token
            factor[number, column], added[number, column] = times, plus
    return ids, factor, added
