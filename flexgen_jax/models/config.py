"""The model's architecture, independent of how any checkpoint spells it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexgen_jax.errors import UserError
from flexgen_jax.models.formats.published import Published
from flexgen_jax.models.parts import (
    LAYER_NORM,
    AttentionSpec,
    ConfigError,
    ExpertsSpec,
    LayerParts,
    NormPlace,
    NormSpec,
    check_positive,
)

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Compute and storage dtypes, with their size in bytes."""


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class AdapterShapes:
    """The LoRA adapters of a model; see `models.adapters`.

    names: the names in requests, () for a single adapter that applies to all texts; ranks: the
    largest rank for each adapted matrix, by the matrix's key; content: a digest of the files.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[str, int], ...]
    content: str

    @property
    def count(self) -> int:
        return max(1, len(self.names))


@dataclass(frozen=True)
class ModelConfig:
    """Everything the layers need to know about a decoder-only transformer.

    Sizes count elements. kinds, pattern: the different decoder layers, and the index of its kind
    for each layer. `max_positions` is the context length in tokens. A table of learned positions
    has `position_offset` more rows (OPT keeps two for padding); None says that there is none.
    `embed_size` differs from `hidden_size` if embeddings are projected (OPT-350m); `embed_scale`
    multiplies them (Gemma). With `is_parallel`, attention and feed-forward block have one input and
    are added to it together (GPT-NeoX). logit_softcap: as in `AttentionSpec`. has_layer_scale:
    whether each layer's output is multiplied by a learned scalar (Gemma 4).

    context_limit: why `max_positions` is less than the model's own context, "" if it is not.

    published: the formats of the tensors that the model's files have in few bits, if there are
    some. adapters: those that are applied, if there are some.

    A stage of a model has some of its layers, see `part`: `first_layer` is the number of its first
    layer. Other stages have the embedding or the head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    kinds: tuple[LayerParts, ...]
    pattern: tuple[int, ...]
    embed_size: int
    norm: NormSpec = LAYER_NORM
    norm_place: NormPlace = "before"
    is_parallel: bool = False
    position_offset: int | None = None
    embed_scale: float = 1.0
    final_norm: bool = True
    logit_softcap: float | None = None
    has_layer_scale: bool = False
    context_limit: str = ""
    tied_head: bool = True
    bos_id: int | None = 2
    eos_ids: tuple[int, ...] = (2,)
    pad_id: int = 1
    dtype: str = "float16"
    first_layer: int = 0
    has_embedding: bool = True
    has_head: bool = True
    published: Published | None = None
    adapters: AdapterShapes | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_positions", "embed_size"):
            check_positive(name, getattr(self, name))
        check_positive("num_hidden_layers", len(self.pattern))
        for name, ids in (("eos_token_id", self.eos_ids), ("pad_token_id", (self.pad_id,))):
            if not all(_is_id(token) for token in ids):
                raise ConfigError(f"{name} must be a token id, not {ids!r}")
        if self.bos_id is not None and not _is_id(self.bos_id):
            raise ConfigError(f"bos_token_id must be a token id, not {self.bos_id!r}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not supported; choose one of {list(DTYPES)}"
            )

    def check_lengths(self, prompt_len: int, gen_len: int) -> None:
        """Raises `UserError` unless prompt and generated tokens together fit into the context."""
        if prompt_len < 1 or gen_len < 1 or prompt_len + gen_len > self.max_positions:
            raise UserError(
                f"--prompt-len {prompt_len} plus --max-tokens {gen_len} must not exceed the "
                f"model's context of {self.max_positions} tokens"
            )

    def part(self, layers: range) -> ModelConfig:
        """Returns the config of a stage with these decoder layers: the first part also has the
        embedding, the last part the head."""
        return replace(
            self,
            pattern=self.pattern[layers.start : layers.stop],
            first_layer=layers.start,
            has_embedding=layers.start == 0,
            has_head=layers.stop == self.num_layers,
        )

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def projects_embeddings(self) -> bool:
        return self.embed_size != self.hidden_size

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each kind of decoder layer that attends."""
        mixers = (layer_parts.mixer for layer_parts in self.kinds)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @property
    def all_attend(self) -> bool:
        """Whether every decoder layer attends: of a state, a row has one and no branches."""
        return len(self.attentions) == len(self.kinds)

    @property
    def has_windows(self) -> bool:
        """Whether some layers see only the latest tokens."""
        return any(attention.window is not None for attention in self.attentions)

    @property
    def short_positions(self) -> int | None:
        """The longest sequence that uses longrope's short frequencies; None without
        longrope."""
        rotaries = (attention.rotary for attention in self.attentions)
        borders = [r.original for r in rotaries if r is not None and r.kind == "longrope"]
        return min(borders, default=None)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that texts choose from."""
        return () if self.adapters is None else self.adapters.names

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer_parts.mlp, ExpertsSpec) for layer_parts in self.kinds)
