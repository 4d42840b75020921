"""The quantized tensors of a published model, and their formats. No JAX, no NumPy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from flexgen_jax.models.formats.format import Format


@dataclass(frozen=True)
class Published:
    """The formats of the tensors in a model's files.

    name: of the method, such as "FP8"; bits: of most weights, 8 or 4, whose rates and sizes of work
    a plan takes; formats: by tensor key, where "{e}" matches every expert's number.
    Tensors that are not there are plain.
    """

    name: str
    bits: int
    formats: tuple[tuple[str, Format], ...]

    @cached_property
    def _by_key(self) -> dict[str, Format]:
        return dict(self.formats)

    def format_of(self, key: str) -> Format | None:
        """Returns the format of a tensor, None if it is plain."""
        return self._by_key.get(of_any_expert(key))


def of_any_expert(key: str) -> str:
    """Returns a tensor's key without its expert's number."""
    return re.sub(r"\.experts\.\d+\.", ".experts.{e}.", key)
