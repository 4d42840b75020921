"""Sources of weights: the interface, and an implementation with seeded random numbers.

A source returns ranges of a tensor's rows, so that no tensor has to be in RAM whole.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.tensor_spec import TensorSpec

FORMAT_VERSION = 1
"""Version of the bytes in offload folders, part of every fingerprint; raise it on a change."""


FLOATS = {"float16": (15, 10), "bfloat16": (127, 7), "float32": (127, 23)}
"""The exponent's bias and the mantissa's bits of each dtype."""


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class WeightSource(Protocol):
    """Anything that can fill a model's tensors."""

    config: ModelConfig

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        """Returns rows [start, stop) of the tensor's first axis, in `dtype`."""
        ...

    def read_packed(self, tensor: TensorSpec, start: int, stop: int) -> list[np.ndarray]:
        """Returns the leaves of rows [start, stop) of a tensor that is published in few bits; start
        is a multiple of its format's rows."""
        ...

    def fingerprint(self, dtype: str) -> str:
        """Returns a name for these weights in `dtype`, which later runs use to find stored copies.

        It changes when the files are modified or replaced, even by equal ones.
        """
        ...

    def content(self, dtype: str) -> str:
        """Returns a name for the content of these weights in `dtype`, equal for copied files."""
        ...

    @property
    def reads_at_once(self) -> int:
        """How many threads may read, and gain from it."""


class DummyWeights:
    """Random weights of the right shapes. A tensor's numbers depend on seed and key alone."""

    ROWS = (
        256  # numbers are drawn in pieces of this many rows, independent of the range that is read
    )
    reads_at_once = 8

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self._seed = seed

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        target = numpy_dtype(dtype)
        if len(tensor.shape) == 1:
            fill = 1.0 if tensor.path.endswith("scale") else 0.0
            return np.full(stop - start, fill, target)
        first = start // self.ROWS
        pieces = [
            self._draw(tensor, piece, target) for piece in range(first, -(-stop // self.ROWS))
        ]
        offset = first * self.ROWS
        return np.concatenate(pieces)[start - offset : stop - offset]

    def _draw(self, tensor: TensorSpec, piece: int, dtype: np.dtype) -> np.ndarray:
        """Draws numbers of either sign with a magnitude from 2^-7 to 2^-5, so that their standard
        deviation is 0.019, about OPT's own initial scale: random bits for the sign, the lowest bit
        of the exponent and the mantissa, which take a tenth of the time of numbers that are drawn
        in fp32 and rounded."""
        name = f"{self._seed}/{tensor.key}/{piece}".encode()
        seed = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
        generator = np.random.Generator(np.random.SFC64(seed))
        rows = min(self.ROWS, tensor.shape[0] - piece * self.ROWS)
        count, (bias, mantissa) = rows * math.prod(tensor.shape[1:]), FLOATS[dtype.name]
        uint_dtype = np.dtype(f"u{dtype.itemsize}")
        words = generator.integers(0, 1 << 64, -(-count * dtype.itemsize // 8), np.uint64)
        bits = words.view(uint_dtype)[:count]
        bits &= uint_dtype.type((1 << (8 * dtype.itemsize - 1)) | ((2 << mantissa) - 1))
        bits |= uint_dtype.type((bias - 7) << mantissa)
        return bits.view(dtype).reshape(rows, *tensor.shape[1:])

    def read_packed(self, tensor: TensorSpec, start: int, stop: int) -> list[np.ndarray]:
        """Returns random codes, and scales that make numbers as small as those of `read`."""
        storage = Storage((stop - start, *tensor.shape[1:]), "bfloat16", tensor.published)
        return random_leaves(storage, np.random.default_rng([self._seed, start, len(tensor.key)]))

    def fingerprint(self, dtype: str) -> str:
        return digest("dummy bits", FORMAT_VERSION, self.config, self._seed, dtype)

    def content(self, dtype: str) -> str:
        return self.fingerprint(dtype)


def random_leaves(storage: Storage, generator: np.random.Generator) -> list[np.ndarray]:
    """Returns the leaves of an array in a format: random codes, and small scales."""
    leaves = []
    for leaf in storage.leaves:
        shape, dtype = leaf.shape, numpy_dtype(leaf.kind)
        if leaf.name.startswith("packed"):
            leaves.append(generator.integers(0, 127, shape, np.uint8))  # 127 is an FP8's NaN
        elif leaf.name == "order":
            leaves.append(np.arange(shape[0], dtype=dtype))
        else:
            exponents = {"e8m0": 119, "e4m3": 8, "uint8": 8, "int8": 0}
            unit = 0.0002 if storage.packing.levels == "e4m3" else 0.002
            leaves.append(np.full(shape, exponents.get(leaf.dtype, unit), dtype))
    return leaves


def digest(*parts: Any) -> str:
    """Returns a short name for some values: 24 hex digits of the SHA-256 of their `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
