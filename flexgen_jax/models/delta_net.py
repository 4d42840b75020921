"""Gated DeltaNet, a layer that keeps a state of constant size, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexgen_jax.models.parts import ConfigError, StateLeaf, check_positive, linear

CHUNK = 64
"""Tokens of a prompt that are computed at once."""


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks", section 3).

    Each value head keeps a matrix, [key_size, value_size]. A token first decays the matrix, then
    removes the value stored at its key, and adds its own value there. Value heads share heads of
    queries and keys, consecutive ones form a group. Before that, each element of queries, keys and
    values is a weighted sum of its last `width` tokens. The result is normalised and multiplied
    with a gate. are_tiled: whether value head j belongs to key head j % key_heads, as in GGUF
    files, and not to key head j // group.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int = 4
    are_tiled: bool = False

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_size", "value_size"):
            check_positive(f"linear {name}", getattr(self, name))
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear_num_value_heads {self.value_heads} is not a multiple of "
                f"linear_num_key_heads {self.key_heads}"
            )
        if self.width < 2:
            raise ConfigError(f"linear_conv_kernel_dim must be at least 2, not {self.width}")

    @property
    def group(self) -> int:
        """Number of value heads that share a head of queries and keys."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Elements of a token's key, and of its query."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of a token's value, and of its result."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Elements of a token's query, key and value."""
        return 2 * self.keys + self.values

    @property
    def inner_size(self) -> int:
        """Elements of a token's query, key and value, concatenated, and of the convolution's
        earlier tokens; and of its result in two orders and its gate."""
        return 3 * self.channels + 3 * self.values

    @cached_property
    def leaves(self) -> tuple[StateLeaf, ...]:
        """The inputs of the next token's convolution, and the matrices in fp32: errors of a
        state add up."""
        columns = (self.width - 1, self.channels)
        matrices = (self.key_heads, self.group, self.key_size, self.value_size)
        return (
            StateLeaf("columns", columns, grows=False, dtype="float32"),
            StateLeaf("state", matrices, grows=False, dtype="float32"),
        )

    def tensors(self, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
        return [
            *linear("q", self.keys, hidden, False),
            *linear("k", self.keys, hidden, False),
            *linear("v", self.values, hidden, False),
            *linear("z", self.values, hidden, False),
            *linear("write", self.value_heads, hidden, False),
            *linear("fade", self.value_heads, hidden, False),
            ("weights", (self.channels, 1, self.width)),
            ("fade_log", (self.value_heads,)),
            ("fade_bias", (self.value_heads,)),
            ("norm.scale", (self.value_size,)),
            *linear("out", hidden, self.values, False),
        ]

    def prefill_flops(self, batch: int, tokens: int, before: int = 0) -> float:
        """Returns the FLOPs of prompts: products of a chunk's keys and queries, a triangular
        system, and products with the state."""
        within = CHUNK * (4.0 * self.key_size + 3.0 * self.value_size)
        with_state = 6.0 * self.key_size * self.value_size
        return batch * tokens * self.value_heads * (within + with_state)
