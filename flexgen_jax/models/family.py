"""Definition of a model family: how its configs are read, and where its tensors are in
checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log, sqrt
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.parts import ConfigError, ExpertsSpec, LayerParts, Mixer, Rotary
from flexgen_jax.models.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Stored:
    """Where a tensor is in a checkpoint: the name of the stored one, and which of its rows.

    Row r of the tensor is row `first + r // unit * stride + r % unit` of the stored one; of a whole
    tensor, `unit` is None. total: rows of the stored one, None if it is whole. expert, experts: of
    a tensor that has one more axis before these rows, for the experts of a layer: which one it is,
    and how many there are. is_transposed: whether the stored tensor has its rows last; a
    tensor in few bits has them first in any case.
    """

    name: str
    first: int = 0
    unit: int | None = None
    stride: int = 0
    total: int | None = None
    expert: int | None = None
    experts: int = 0
    is_transposed: bool = False

    def shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Returns the shape of the stored tensor."""
        rows = tensor.shape[0] if self.total is None else self.total
        before = () if self.expert is None else (self.experts,)
        if self.is_transposed:
            return (*before, *tensor.shape[1:], rows)
        return (*before, rows, *tensor.shape[1:])

    def ranges(self, start: int, stop: int) -> list[slice]:
        """Returns the ranges of the stored tensor's rows that are rows [start, stop) of this
        one."""
        if self.unit is None:
            return [slice(start, stop)]
        if self.unit == 1:
            first, stride = self.first, self.stride
            return [slice(first + start * stride, first + (stop - 1) * stride + 1, stride)]
        ranges = []
        while start < stop:  # unit by unit
            number, offset = divmod(start, self.unit)
            end = min(stop, (number + 1) * self.unit)
            begin = self.first + number * self.stride + offset
            ranges.append(slice(begin, begin + end - start))
            start = end
        return ranges


Find = Callable[[TensorSpec, LayerParts], Stored]
"""Finds a decoder layer's tensor that is stored with others in one; "{i}" in the name is the
layer's index."""

SEEING = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")
"""Prefixes of the tensors of a model's part for text, where it sees, too."""

USELESS = (
    r"(.*\.)?rotary_emb\.inv_freq",
    r"(.*\.)?(attn|attention|self_attn)\.(bias|masked_bias)",
    r"(.*\.)?position_ids",
    r"(.*\.)?[kvq]_(proj\.)?(output_)?scale",
    r"(score|classifier|v_head|value_head|regression_head)\..*",
    r"mtp\..*",
    r"(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower)\..*",
)
"""Patterns of names of tensors that checkpoints of several families have, and that generation does
not need: buffers, scales of a quantized KV cache, heads of other tasks, layers that predict further
tokens, and towers for pictures and sound."""


@dataclass(frozen=True)
class Family:
    """How one `model_type` of Hugging Face maps to this package.

    names: Hugging Face's tensor names by this package's keys, or functions that find tensors that
        are stored in one; "{i}" is the decoder layer's index, "{e}" the expert's.
    other_names: names in another layout of the same model, such as that of experts which are
        stored together.
    prefixes: strings that may precede every Hugging Face name.
    ignored: patterns of checkpoint tensors that inference does not need, in addition to `USELESS`.
    """

    model_type: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    names: Mapping[str, str | Find]
    other_names: Mapping[str, str | Find] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ()

    def layouts(self, tensor: TensorSpec, config: ModelConfig) -> list[Stored]:
        """Returns where a tensor may be, the usual place first; the names have no prefix:
        "decoder.layers.3.fc1.weight"."""
        return [
            self._stored(names, tensor, config)
            for names in (self.names, self.other_names)
            if self._key(tensor) in names
        ]

    def stored(self, tensor: TensorSpec, config: ModelConfig) -> Stored:
        """Returns where a tensor usually is."""
        return self.layouts(tensor, config)[0]

    def _key(self, tensor: TensorSpec) -> str:
        """Returns the key of a tensor in `names`."""
        key = re.sub(r"^decoder\.\d+\.", "decoder.{i}.", tensor.key)
        return re.sub(r"^decoder\.\{i\}\.experts\.\d+\.", "decoder.{i}.experts.{e}.", key)

    def _stored(
        self, names: Mapping[str, str | Find], tensor: TensorSpec, config: ModelConfig
    ) -> Stored:
        layer = re.match(r"decoder\.(\d+)\.", tensor.key)
        stored = names[self._key(tensor)]
        if layer is None:
            assert isinstance(stored, str), "only decoder layers are stored in parts"
            return Stored(stored)
        if not isinstance(stored, str):
            layer_parts = config.kinds[config.pattern[int(layer[1])]]
            location = stored(tensor, layer_parts)
            return replace(location, name=location.name.replace("{i}", layer[1]))
        return Stored(stored.replace("{i}", layer[1]).replace("{e}", str(tensor.expert)))

    def full_name(self, name: str, is_stored: Callable[[str], bool]) -> str | None:
        """Returns a tensor's stored name, possibly with a prefix; None if it is not."""
        return next((p + name for p in self.prefixes if is_stored(p + name)), None)

    def bare_name(self, full: str) -> str:
        """Returns a stored tensor's name without a prefix."""
        return next((full[len(p) :] for p in self.prefixes if p and full.startswith(p)), full)

    def is_ignored(self, name: str, num_layers: int) -> bool:
        """Returns whether a tensor that is not the model's is known to be useless: those of layers
        from `num_layers` on predict further tokens."""
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= num_layers:
            return True
        return any(re.fullmatch(pattern, name) for pattern in (*self.ignored, *USELESS))


def by_mixer(kind: type, of_kind: str | Find, of_others: str | Find) -> Find:
    """Returns how to find a tensor that two types of layers have, each at a place of its own: those
    whose mixer is of a kind, and others."""

    def find(tensor: TensorSpec, parts: LayerParts) -> Stored:
        stored = of_kind if isinstance(parts.mixer, kind) else of_others
        return Stored(stored) if isinstance(stored, str) else stored(tensor, parts)

    return find


def joined(name: str, sizes: Callable[[LayerParts], Sequence[int]], index: int) -> Find:
    """Returns a finder for part `index` of tensors that are concatenated by rows."""

    def find(tensor: TensorSpec, parts: LayerParts) -> Stored:
        rows = sizes(parts)
        size = rows[index]
        return Stored(name, sum(rows[:index]), size, size, sum(rows))

    return find


def fused(name: str, index: int, count: int, is_transposed: bool = False) -> Find:
    """Returns how to find the part `index` of `count` equal ones by rows, in a tensor that has
    those of all experts: [expert, part x row, column], or transposed [expert, column, part x row].
    """

    def find(tensor: TensorSpec, parts: LayerParts) -> Stored:
        assert isinstance(parts.mlp, ExpertsSpec)
        rows = tensor.shape[0]
        return Stored(
            name,
            first=index * rows,
            unit=rows,
            stride=rows,
            total=count * rows,
            expert=tensor.expert,
            experts=parts.mlp.count,
            is_transposed=is_transposed,
        )

    return find


def in_one_row(name: str) -> Find:
    """Returns a finder for a tensor that is stored as a matrix with one row."""

    def find(tensor: TensorSpec, parts: LayerParts) -> Stored:
        return Stored(name, expert=0, experts=1)

    return find


def alternating(name: str, index: int, is_transposed: bool = False) -> Find:
    """Returns how to find the even rows (0) or the odd ones (1) in a tensor that has those of all
    experts; see `fused`."""

    find_both = fused(name, 0, 2, is_transposed)

    def find(tensor: TensorSpec, parts: LayerParts) -> Stored:
        return replace(find_both(tensor, parts), first=index, unit=1, stride=2)

    return find


def woven(name: str, index: int, count: int = 3) -> Find:
    """Returns how to find one of `count` tensors that are stored head by head: queries (0), keys
    (1) or values (2)."""

    def find(tensor: TensorSpec, parts: LayerParts) -> Stored:
        size = parts.attention.head_dim
        return Stored(name, index * size, size, count * size, count * tensor.shape[0])

    return find


def with_text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the text config of a multimodal model, with the whole model's type, special tokens
    and settings of the head."""
    names = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    whole = {name: raw[name] for name in names if raw.get(name) is not None}
    return {**raw, **(raw.get("text_config") or {}), **whole}


class Fields:
    """The fields of a Hugging Face config, for those who must have them or know a default."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default if it is absent or null; raises `ConfigError` if there is
        no default either."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"the config has no {name!r}")
        return value

    def maybe(self, name: str) -> Any:
        """Returns a field, or None if it is absent or null."""
        return self.raw.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a field that is a positive integer."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a field that is a number."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{name} must be a number, not {value!r}")
        return float(value)

    @property
    def dtype(self) -> str | None:
        """The weights' dtype as the config has it, None if it does not say."""
        for name in ("dtype", "torch_dtype"):
            value = self.raw.get(name)
            if value is not None and value != "auto":
                return value.removeprefix("torch.") if isinstance(value, str) else value
        return None

    @property
    def _rope(self) -> Any:
        """The config's rotary embeddings; transformers before version 5 had the first
        name, which still comes first."""
        return self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}

    @property
    def max_positions(self) -> int:
        """The most tokens of a sequence: those of training, or the longer context of scaled rotary
        embeddings.

        Linear scaling and yarn stretch by a factor; llama3 and longrope are for the number that
        the config has, and dynamic scaling is not done beyond it.
        """
        longest = self.count("max_position_embeddings")
        rope = self._rope
        rope_type = rope.get("rope_type") or rope.get("type") if isinstance(rope, Mapping) else None
        if rope_type not in ("linear", "yarn") or not isinstance(rope.get("factor"), int | float):
            return longest
        name = "original_max_position_embeddings"
        original = self.raw.get(name) or rope.get(name) if rope_type == "yarn" else None
        return max(longest, int(rope["factor"] * (original or longest)))

    def ids(self, bos: int | None = None, eos: int | None = None) -> dict[str, Any]:
        """Returns the fields of `ModelConfig` for special tokens and the dtype, with a family's
        own defaults. Without a padding token, another token serves: padding is masked."""
        raw = self.raw.get("eos_token_id", eos)
        ends = tuple(raw) if isinstance(raw, list) else () if raw is None else (raw,)
        pad = self.raw.get("pad_token_id")
        is_id = isinstance(pad, int) and pad >= 0
        return {
            "bos_id": self.raw.get("bos_token_id", bos),
            "eos_ids": ends,
            "pad_id": pad if is_id else 0,
            "dtype": self.dtype or "float32",
        }

    def rotary(
        self,
        head_dim: int,
        layer_type: str | None = None,
        rotates_part: bool = False,
        is_interleaved: bool = False,
        **defaults: Any,
    ) -> Rotary:
        """Returns the rotary embeddings of a config, of a kind of layer if there are several;
        `defaults` has the family's own theta and share of a head.

        They are in `rope_parameters`, or in `rope_theta` and `rope_scaling` as transformers before
        version 5 wrote them. rotates_part: whether the family's plain embeddings have a share of a
        head, too, as scaled ones have in every family.
        """
        rope = self._rope
        if layer_type is not None and layer_type in rope:
            rope = rope[layer_type] or {}
        if not isinstance(rope, Mapping):
            raise ConfigError("rope_parameters (rope_scaling) must be an object")
        fields = Fields(
            defaults | dict(self.raw) | {k: v for k, v in rope.items() if v is not None}
        )
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        is_whole = rope_type == "default" and not rotates_part
        share = 1.0 if is_whole else fields.number("partial_rotary_factor", 1.0)
        longest = self.count("max_position_embeddings")
        original = int(self.raw.get("original_max_position_embeddings") or 0)
        original = original or int(rope.get("original_max_position_embeddings") or longest)
        size = int(head_dim * share)
        if rope_type == "proportional":  # the whole head turns, most of its pairs by nothing
            theta, factor = fields.number("rope_theta", 10000.0), fields.number("factor", 1.0)
            return Rotary(head_dim, theta, rope_type, factor, turning=size // 2)
        rotary = _scaled_rotary(fields, rope_type, size=size, original=original, longest=longest)
        return replace(rotary, is_interleaved=is_interleaved)

    @property
    def position_scale(self) -> tuple[float, int] | None:
        """The factors of queries by position; see `AttentionSpec.position_scale`."""
        rope = self._rope
        weight = rope.get("llama_4_scaling_beta")
        if not weight:
            return None
        original = Fields(rope).count("original_max_position_embeddings")
        return Fields(rope).number("llama_4_scaling_beta"), original

    @property
    def score_scale(self) -> float:
        """The factor of attention's scores that goes with yarn in DeepSeek's models, the square of
        0.1 m ln(factor) + 1."""
        rope = Fields(self._rope)
        rope_type = rope.maybe("rope_type") or rope.maybe("type") or "default"
        weight = rope.maybe("mscale_all_dim")
        if rope_type == "default" or not weight:
            return 1.0
        factor = rope.number("factor")
        return 1.0 if factor <= 1 else float(0.1 * weight * log(factor) + 1.0) ** 2


def _scaled_rotary(own: Fields, kind: str, size: int, original: int, longest: int) -> Rotary:
    """Returns rotary embeddings of a kind, from the fields that it needs."""
    theta = own.number("rope_theta", 10000.0)
    if kind in ("default", "dynamic"):
        return Rotary(size, theta, kind)
    if kind == "linear":
        return Rotary(size, theta, kind, own.number("factor"))
    if kind == "llama3":
        slow, fast = own.number("low_freq_factor"), own.number("high_freq_factor")
        return Rotary(size, theta, kind, own.number("factor"), original, slow, fast)
    if kind == "yarn":
        factor = own.number("factor", longest / original)
        slow, fast = own.number("beta_slow", 1.0), own.number("beta_fast", 32.0)
        if not 0 < slow < fast:
            raise ConfigError(f"beta_slow {slow:g} must be positive and below beta_fast {fast:g}")
        truncates = bool(own.get("truncate", True))
        return Rotary(
            size, theta, kind, factor, original, slow, fast, truncates, _yarn_scale(own, factor)
        )
    if kind in ("longrope", "su"):
        factor = own.number("factor", longest / original)
        own_scale = own.maybe("attention_factor")
        scale = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
        short_factors, long_factors = (
            tuple(own.get(f"{name}_factor")) for name in ("short", "long")
        )
        return Rotary(
            size,
            theta,
            "longrope",
            factor,
            original,
            scale=own_scale or scale,
            short=short_factors,
            long=long_factors,
        )
    return Rotary(size, theta, kind)


def _yarn_scale(own: Fields, factor: float) -> float:
    """Returns the factor of cosines and sines (Peng et al. 2023, "YaRN", section 3.4)."""
    attention_factor, mscale, whole = (
        own.maybe(n) for n in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention_factor is not None:
        return float(attention_factor)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0

    return scale(mscale) / scale(whole) if mscale and whole else scale(1.0)


def pairs(ours: str, theirs: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Returns names of the parts of one block."""
    return {f"{ours}.{path}": f"{theirs}.{name}" for path, name in parts.items()}


LINEAR = {"kernel": "weight", "bias": "bias"}
NORM = {"scale": "weight", "bias": "bias"}


def layer_types(raw: Mapping[str, Any], usual: Sequence[str], kinds: tuple[str, str]) -> list[str]:
    """Returns the type of each layer, one of two `kinds`; usual: of a config without them."""
    types = list(raw.get("layer_types") or usual)
    if set(types) - {*kinds} or len(types) != len(usual):
        raise ConfigError(
            f"layer_types must have {kinds[0]!r} or {kinds[1]!r} for each of {len(usual)} layers, "
            f"not {types}"
        )
    return types


def with_mixer(config: ModelConfig, mixer: Mixer, has_mixer: Sequence[bool]) -> ModelConfig:
    """Returns a config with another mixer in some layers; has_mixer: whether each layer has it."""
    kinds = [config.kinds[number] for number in config.pattern]
    kinds = [
        replace(kind, mixer=mixer) if has else kind
        for kind, has in zip(kinds, has_mixer, strict=True)
    ]
    return replace(config, **pattern_of(kinds))


def pattern_of(kinds: Sequence[LayerParts]) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for decoder layers that have these parts."""
    different = tuple(dict.fromkeys(kinds))
    return {
        "kinds": different,
        "pattern": tuple(different.index(layer_parts) for layer_parts in kinds),
    }
