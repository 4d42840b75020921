"""The formats that this package writes itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from flexgen_jax.models.formats.format import Factor, Format, affine, centered
from flexgen_jax.models.formats.storage import GROUP_SIZE

WeightFormat = Literal["own", "paper"]
"""How weights are quantized when they are loaded."""

WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("own", "paper")

OWN_GROUP = 32
"""Elements along a kernel's input that share a scale."""


@lru_cache
def paper(bits: int) -> Format:
    """Returns the format of FlexGen, section 5: groups of 64 along the output channels, with a
    scale and a minimum of two bytes."""
    return affine(bits, GROUP_SIZE, axis=-2)


@lru_cache
def own(bits: int, is_table: bool = False) -> Format:
    """Returns the format of weights that are quantized when they are loaded.

    With 4 bits, a group of 32 elements along the input has a scale and a minimum of 8 bits each,
    which count in units of their row: 4.5 bits an element. Tables of embeddings and the head have 8
    bits in either case, around zero with a scale a group: they lose most by 4 bits.
    """
    if bits == 8 or is_table:
        return centered(8, OWN_GROUP, "bfloat16")
    unit = Factor("bfloat16", 0)
    return Format(
        bits=4,
        scale=Factor("uint8", OWN_GROUP, of=unit),
        minimum=Factor("int8", OWN_GROUP, of=unit),
    )
