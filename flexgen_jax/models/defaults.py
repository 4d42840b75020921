"""What a folder's generation_config.json asks for: end tokens, and defaults of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from flexgen_jax.models.folder import CheckpointError, read_object

FILE = "generation_config.json"

TOP_K = 50
"""How many of the likeliest tokens a folder that samples means where it does not say, as in
transformers."""


RULES = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_eos_token_id",
)
"""What texts follow in every token, greedy ones included."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults of sampling parameters that a request does not set, see `SamplingParams`; greedy
    where a folder has no wish.

    max_length, min_length: as `max_tokens` and `min_tokens`, with the prompt's tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    min_tokens: int = 0
    min_length: int = 0
    max_tokens: int | None = None
    max_length: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def rules(self) -> dict[str, Any]:
        """Requested settings other than temperature, top_k, top_p and lengths, by name."""
        names = ("min_p", *RULES, "min_tokens", "min_length", "stop")
        plain = SamplingDefaults()
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(plain, n)}


GREEDY = SamplingDefaults()


@dataclass(frozen=True)
class GenerationDefaults:
    """A folder's wishes; eos_ids: its end tokens, None if it names none; undone: names of
    unsupported fields with an effect; path: the file that has them."""

    sampling: SamplingDefaults
    eos_ids: tuple[int, ...] | None
    undone: tuple[str, ...]
    path: Path


DONE = frozenset(
    (
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        *RULES,
        "min_new_tokens",
        "min_length",
        "max_new_tokens",
        "max_length",
        "stop_strings",
        "eos_token_id",
    )
)
"""Supported fields of transformers' `GenerationConfig`."""

WITHOUT_EFFECT = frozenset(
    (
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "prefill_chunk_size",
        "low_memory",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "renormalize_logits",
        "remove_invalid_values",
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_lookbehind",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "target_lookbehind",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "speculation_type",
        "early_stopping",
        "length_penalty",
        "transformers_version",
        "_from_model_config",
        "_commit_hash",
        "trust_remote_code",
    )
)
"""Fields that change no text here: how transformers caches and compiles, what it returns, how it
guesses tokens ahead, and what only beams use."""

UNDONE: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0,),
    "constraints": (),
    "force_words_ids": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "max_time": (),
}
"""Unsupported fields, and their values without an effect (null has none either)."""

UNDONE_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""The same for fields that only change random choices."""


IN_CONFIG = (DONE - {"eos_token_id"}) | {*UNDONE, *UNDONE_SAMPLING}
"""Fields that are read in config.json where there is no generation_config.json."""


def read_defaults(folder: Path) -> GenerationDefaults:
    """Reads a folder's generation_config.json; raises `CheckpointError` if it is not valid.

    Without one, config.json may have the same fields, as it had before that file was invented.
    """
    path = folder / FILE
    raw = {key: value for key, value in read_object(path).items() if value is not None}
    if not path.is_file():
        path = folder / "config.json"
        raw = {k: x for k, x in read_object(path).items() if k in IN_CONFIG and x is not None}
    fields = _Fields(path, raw)
    ends = fields.ids("eos_token_id")
    if not all(end >= 0 for end in ends or ()):
        raise fields.wrong("eos_token_id", "token ids")
    is_sampled = fields.flag("do_sample")
    sampling = SamplingDefaults(
        **(_choice(fields) if is_sampled else {}),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 1e-3, 1e3),
        no_repeat_ngram_size=fields.count("no_repeat_ngram_size", 0),
        bad_words_ids=fields.rows("bad_words_ids"),
        suppress_tokens=_tokens(fields.ids("suppress_tokens")),
        begin_suppress_tokens=_tokens(fields.ids("begin_suppress_tokens")),
        forced_eos_token_id=fields.ids("forced_eos_token_id") or (),
        min_tokens=fields.count("min_new_tokens", 0),
        min_length=0 if "min_new_tokens" in raw else fields.count("min_length", 0),
        max_tokens=fields.maybe_count("max_new_tokens"),
        max_length=None if "max_new_tokens" in raw else fields.maybe_count("max_length"),
        stop=fields.texts("stop_strings"),
    )
    return GenerationDefaults(sampling, ends, _undone(raw, is_sampled), path)


def _tokens(ids: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns token ids without -1, which means none in some folders."""
    return tuple(token for token in ids or () if token >= 0)


def _choice(fields: _Fields) -> dict[str, Any]:
    """Returns the sampling settings."""
    return {
        "temperature": fields.number("temperature", 1.0, 0.0, 1e6),
        "top_k": fields.count("top_k", TOP_K),
        "top_p": fields.number("top_p", 1.0, 1e-6, 1.0),
        "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
    }


def _undone(raw: Mapping[str, Any], is_sampled: bool) -> tuple[str, ...]:
    """Returns the names of unsupported fields with an effect, including unknown fields."""
    undone = {**UNDONE, **UNDONE_SAMPLING} if is_sampled else UNDONE
    names = []
    for name, value in raw.items():
        is_known = name in DONE or name in WITHOUT_EFFECT or name in UNDONE_SAMPLING
        if name in undone:
            is_known = value in undone[name] or value in ([], {})
        if not is_known:
            names.append(name)
    return tuple(sorted(names))


class _Fields:
    """The fields of a generation_config.json; raises a `CheckpointError` that names the file and
    the field."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self._path, self._raw = path, raw

    def wrong(self, name: str, needed: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {name} must be {needed}, not {self._raw[name]!r}")

    def _checked(self, name: str, default: Any, is_right: Callable[[Any], bool], what: str) -> Any:
        if name not in self._raw:
            return default
        if not is_right(self._raw[name]):
            raise self.wrong(name, what)
        return self._raw[name]

    def flag(self, name: str) -> bool:
        return bool(self._checked(name, False, lambda x: x in (True, False), "true or false"))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        def is_right(x: Any) -> bool:
            return isinstance(x, int | float) and isfinite(x) and low <= x <= high

        return float(self._checked(name, default, is_right, f"from {low:g} to {high:g}"))

    def count(self, name: str, default: int) -> int:
        return int(self._checked(name, default, _is_count, "a whole number of at least 0"))

    def maybe_count(self, name: str) -> int | None:
        """Returns a positive number, None for one that is absent."""
        requirement = "a whole number of at least 1"
        count: int | None = self._checked(name, None, lambda x: _is_count(x) and x > 0, requirement)
        return count

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Returns token ids; the value may also be a single id; None if the field is absent."""
        ids = self._checked(name, None, _is_id_or_ids, "token ids")
        return None if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    def rows(self, name: str) -> tuple[tuple[int, ...], ...]:
        def is_right(x: Any) -> bool:
            return isinstance(x, list) and all(
                isinstance(r, list) and all(map(_is_count, r)) for r in x
            )

        return tuple(map(tuple, self._checked(name, (), is_right, "a list of lists of token ids")))

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._raw.get(name, ())
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) and t for t in texts):
            raise self.wrong(name, "a text or texts")
        return tuple(texts)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_id_or_ids(value: Any) -> bool:
    return all(isinstance(x, int) for x in (value if isinstance(value, list) else [value]))
