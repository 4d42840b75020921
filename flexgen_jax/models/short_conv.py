"""Gated short convolutions, a layer that keeps its last inputs, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexgen_jax.models.parts import ConfigError, StateLeaf, linear


@dataclass(frozen=True)
class ShortConvSpec:
    """The short convolution of LFM2 (Liquid AI 2025, "LFM2 Technical Report", section 2).

    A product makes three vectors of `channels` elements of each token: an input gate, an output
    gate and a value. The input gate multiplies the value. Then each channel is a weighted sum of
    its last `width` tokens, which the output gate multiplies. has_bias: whether products and sums
    have a bias.
    """

    channels: int
    width: int = 3
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ConfigError(f"conv_L_cache must be at least 2, not {self.width}")

    @property
    def inner_size(self) -> int:
        """Elements of a token's gates and value, of the gated value and of the sum."""
        return 5 * self.channels

    @cached_property
    def leaves(self) -> tuple[StateLeaf, ...]:
        """The gated values that the next token's sum needs."""
        columns = (self.width - 1, self.channels)
        return (StateLeaf("columns", columns, grows=False, dtype="float32"),)

    def tensors(self, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
        bias = [("weights_bias", (self.channels,))] if self.has_bias else []
        return [
            *linear("inputs", 3 * self.channels, hidden, self.has_bias),
            ("weights", (self.channels, 1, self.width)),
            *bias,
            *linear("out", hidden, self.channels, self.has_bias),
        ]

    def prefill_flops(self, batch: int, tokens: int, before: int = 0) -> float:
        """Returns the FLOPs of gates and weighted sums."""
        return 2.0 * batch * tokens * self.channels * (self.width + 1)
