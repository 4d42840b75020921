"""How the next token is chosen and when a sequence ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import numpy as np

from flexgen_jax.engine.grammar import schema_text
from flexgen_jax.models.defaults import SamplingDefaults

MOST_LOGPROBS = 20
"""The most tokens whose log-probabilities are returned beside the chosen one's."""

LEAST_ADJUSTED = 16
"""Rows adjust a power of two of logits, this or more, so that few programs are compiled."""

LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 1e3),
}
"""The least and the largest values of parameters that are real numbers."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Temperature, top_k and top_p are as the model's folder wants (generation_config.json) where they
    are None, and greedy if it has no wish. A temperature of 0 is greedy; top_k 0, top_p 1 and min_p
    0 exclude no token; min_p is a share of the likeliest token's probability. The `stop` strings
    end a sequence and are not part of its text. Its random draws depend only on `seed` and on the
    request's place in the call, whatever else runs beside it. With `ignore_eos`, the end token does
    not end a sequence.

    min_tokens: the end token cannot come before so many tokens. repetition_penalty divides the
    logits above 0 of tokens in the prompt or the text, and multiplies others; logit_bias is added
    to the logits of single tokens, by id; presence_penalty is taken off those of tokens in the
    text, frequency_penalty as often as they are in it; in this order. logprobs: returns each
    token's log-probability, before all of these, with those of so many likeliest tokens.
    n: how many texts are made of the prompt, in `LLM.generate` and `LLM.chat`.
    json_schema: the text is JSON of this schema, which is an object, or JSON text; `max_tokens` may
    still cut it off.

    Raises `ValueError` that names the parameter.
    """

    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop: Sequence[str] = ()
    seed: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        given = self.logit_bias
        pairs = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "logit_bias", tuple(sorted((i, bias) for i, bias in pairs)))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
            if self.min_tokens or self.ignore_eos or self.stop:
                others = "min_tokens, ignore_eos or stop"
                raise ValueError(f"json_schema says where a text ends: no {others}")
        _check_integer("n", self.n, 1)
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0)
        _check_integer("seed", self.seed, None)
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and low <= value <= high):
                raise ValueError(f"{name} must be from {low:g} to {high:g}, not {value!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        for token, bias in self.biases:
            _check_integer("a token id in logit_bias", token, 0)
            if not (_is_number(bias) and -100 <= bias <= 100):
                raise ValueError(f"logit_bias must be from -100 to 100, not {bias!r}")

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
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return bool(any(penalties) or self.logit_bias or self.min_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest tokens are taken, and nothing more is asked for."""
        asks = self.logprobs is not None or self.json_schema is not None
        return not (self.is_sampled or self.is_adjusted or asks)

    def with_defaults(self, defaults: SamplingDefaults) -> SamplingParams:
        """Returns parameters that are all set. Who sets the temperature chooses without the
        folder's top_k and top_p."""
        if self.temperature is not None:
            defaults = SamplingDefaults(self.temperature)
        return replace(
            self,
            temperature=defaults.temperature,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
        )

    def adjustments(
        self, prompt: Collection[int], made: Sequence[int], eos_ids: Sequence[int]
    ) -> dict[int, tuple[float, float]]:
        """Returns the factor and the addend of each logit that is changed for the next token; see
        `layers.sampling.adjust`. made: the tokens of the text so far."""
        factors: dict[int, float] = {}
        added: defaultdict[int, float] = defaultdict(float)
        if self.repetition_penalty != 1:
            factors = dict.fromkeys({*prompt, *made}, self.repetition_penalty)
        if self.presence_penalty or self.frequency_penalty:
            for token, times in Counter(made).items():
                added[token] -= self.presence_penalty + times * self.frequency_penalty
        for token, bias in self.biases:
            added[token] += bias
        if len(made) < self.min_tokens and not self.ignore_eos:
            for token in eos_ids:
                added[token] = -inf
        return {token: (factors.get(token, 1.0), added[token]) for token in {*factors, *added}}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _check_integer(name: str, value: Any, low: int | None, high: int | None = None) -> None:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_whole and (low is None or value >= low) and (high is None or value <= high):
        return
    limits = "" if low is None else f" of at least {low}"
    limits = limits if high is None else f" from {low} to {high}"
    raise ValueError(f"{name} must be a whole number{limits}, not {value!r}")


def sampling_arrays(
    params: Sequence[SamplingParams], places: Sequence[int], starts: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Returns the arguments of `layers.sampling.sample` for a batch but for the logits and the
    token, or () if all rows are greedy.

    places, starts: for each row what its random key follows from, with its seed, and how many
    tokens of its text there are already.
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
        np.array([p.min_p for p in params], np.float32),
        np.stack(keys),
        np.array(starts, np.int32),
    )


def adjusting_arrays(rows: Sequence[Mapping[int, tuple[float, float]]]) -> tuple[np.ndarray, ...]:
    """Returns the arguments of `layers.sampling.adjust` but for the logits, from each row's
    `SamplingParams.adjustments`."""
    most = max(LEAST_ADJUSTED, *(1 << (len(row) - 1).bit_length() if row else 0 for row in rows), 0)
    ids = np.full((len(rows), most), np.iinfo(np.int32).max, np.int32)  # of no vocabulary
    factor, added = np.ones(ids.shape, np.float32), np.zeros(ids.shape, np.float32)
    for number, row in enumerate(rows):
        for column, (token, (times, plus)) in enumerate(row.items()):
            ids[number, column] = token
            factor[number, column], added[number, column] = times, plus
    return ids, factor, added
