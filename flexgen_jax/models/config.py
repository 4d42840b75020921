"""The model's architecture, independent of how any checkpoint spells it."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_jax.errors import UserError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Compute and storage dtypes, with their size in bytes."""

ACTIVATIONS = ("relu", "gelu", "gelu_new")


class ConfigError(UserError):
    """A model description that this package cannot run; the message names the field."""


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class ModelConfig:
    """Everything the layers need to know about a decoder-only transformer.

    Sizes count elements. `max_positions` is the context length in tokens; the position table
    has `position_offset` more rows (OPT keeps two for padding). `embed_size` differs from
    `hidden_size` if embeddings are projected (OPT-350m).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    max_positions: int
    embed_size: int
    position_offset: int = 2
    activation: str = "relu"
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    norm_eps: float = 1e-5
    use_bias: bool = True
    tied_head: bool = True
    bos_id: int | None = 2
    eos_ids: tuple[int, ...] = (2,)
    pad_id: int = 1
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "ffn_size",
            "max_positions",
            "embed_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        for name, ids in (("eos_token_id", self.eos_ids), ("pad_token_id", (self.pad_id,))):
            if not all(_is_id(token) for token in ids):
                raise ConfigError(f"{name} must be a token id, not {ids!r}")
        if self.bos_id is not None and not _is_id(self.bos_id):
            raise ConfigError(f"bos_token_id must be a token id, not {self.bos_id!r}")
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"activation {self.activation!r} is not supported; choose one of {ACTIVATIONS}"
            )
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not supported; choose one of {list(DTYPES)}"
            )

    def check_lengths(self, prompt_len: int, gen_len: int) -> None:
        """Raises `UserError` unless prompt and generated tokens together fit into the context."""
        if prompt_len < 1 or gen_len < 1 or prompt_len + gen_len > self.max_positions:
            raise UserError(
                f"--prompt-len {prompt_len} and --gen-len {gen_len} must be positive and together "
                f"at most the model's context of {self.max_positions}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def projects_embeddings(self) -> bool:
        return self.embed_size != self.hidden_size
