"""Reader of this package's own formats in safetensors, as `flexgen-jax convert` writes them."""

from __future__ import annotations

import numpy as np

from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.packed import Parts
from flexgen_jax.models.formats.storage import Storage

METHOD = "flexgen-jax"
"""The config's "quant_method" for these formats."""

DTYPES = {"uint8": "U8", "int8": "I8", "bfloat16": "BF16"}
"""Safetensors' names of the dtypes of leaves."""


class Own:
    """A matrix in an own format: its leaves by their names after the tensor's, and its shape."""

    METHOD = METHOD

    def __init__(self, parts: Parts) -> None:
        parts.need(".shape")
        parts.check(".shape", (2,), "I64")
        rows, columns = (int(size) for size in parts.array(".shape"))
        self.shape = (rows, columns)
        self.format = own(4) if parts.has(".minimum") else own(8)
        leaves = Storage(self.shape, "bfloat16", self.format).leaves
        for leaf in leaves:
            parts.need(f".{leaf.name}")
            parts.check(f".{leaf.name}", leaf.shape, DTYPES[leaf.kind])
        self.names = tuple(f"{parts.base}.{name}" for name in (*(x.name for x in leaves), "shape"))
        self._leaves = [parts.array(f".{leaf.name}") for leaf in leaves]

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        return [np.ascontiguousarray(leaf[start:stop]) for leaf in self._leaves]
