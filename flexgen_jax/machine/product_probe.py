"""Times single products by this package's kernels and by XLA's own code, which the choice between
them can be compared with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import is_cpu, kernels_of_device, multiplies
from flexgen_jax.layers.encoding import encoded
from flexgen_jax.layers.kernels import Kernels, XlaKernels
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.models.formats import known
from flexgen_jax.models.formats.lanes import in_lanes
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.tensor_spec import Formats

COLUMNS, DEPTH = 8192, 2048
MATRICES = 6
"""This number of matrices is used in turn, so that they come from memory and not from a cache."""

ROWS = (1, 4, 16, 64, 256)


class Product(NamedTuple):
    """Multiplies rows by a matrix of `COLUMNS` x `DEPTH` with the given bits per element.

    nbytes: of the matrix; own_s: seconds by this package's kernel, None if runs leave such a
    product to XLA; xla_s: seconds by XLA's code.
    """

    rows: int
    bits: int
    nbytes: int
    own_s: float | None
    xla_s: float


def time_products(rows: Sequence[int] = ROWS, turns: int = 3) -> Iterator[Product]:
    """Times products of bfloat16 rows by plain and by 4-bit matrices; both ways alternate.

    turns: how many times every matrix is multiplied, after one that does not count.
    """
    ours = kernels_of_device()
    theirs = XlaKernels(ours.sizes, ours.tuning)
    plain = [
        jax.random.normal(jax.random.key(n), (COLUMNS, DEPTH), jnp.bfloat16) * 0.02
        for n in range(MATRICES)
    ]
    storage = Storage(plain[0].shape, str(plain[0].dtype), known.own(4))
    storage = in_lanes(storage) if is_cpu() else storage
    packed = [encoded(matrix, storage) for matrix in plain]
    for count in rows:
        x = jax.random.normal(jax.random.key(count), (count, DEPTH), jnp.bfloat16)
        for bits, matrices in ((16, [*plain]), (4, [*packed])):
            variants = [compiled_product(theirs, x, matrices[0], bits)]
            if multiplies(x, matrices[0]):
                variants.append(compiled_product(ours, x, matrices[0], bits))
            xla_s, *own_seconds = median_seconds(variants, x, matrices, turns)
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(matrices[0]))
            yield Product(count, bits, nbytes, own_seconds[0] if own_seconds else None, xla_s)


def compiled_product(
    kernels: Kernels, x: jax.Array, matrix: Kept, bits: int, matmul_bits: int = 16
) -> jax.stages.Compiled:
    """Compiles a product as a model's programs are compiled; bits: of the matrix; matmul_bits: of
    the numbers that are multiplied."""
    options = kernels_of_device().compiler_options(Formats("bfloat16", bits))

    def multiply(x: jax.Array, matrix: Kept) -> jax.Array:
        return kernels.matmul(x, matrix, None, matmul_bits)

    lowered = jax.jit(multiply).lower(x, matrix)
    return lowered.compile(compiler_options=options)


def median_seconds(
    programs: Sequence[jax.stages.Compiled], x: jax.Array, matrices: Sequence[Kept], turns: int
) -> list[float]:
    """Returns the median seconds of each way of multiplying by a matrix. The ways alternate, each
    with all matrices, so that none finds in the cache what another has read; turns: see
    `time_products`."""
    samples: list[list[float]] = [[] for _ in programs]
    for turn in range(1 + turns):
        for way, own in zip(programs, samples, strict=True):
            for matrix in matrices:
                started = time.perf_counter()
                jax.block_until_ready(way(x, matrix))
                own += [time.perf_counter() - started] if turn else []
    return [float(np.median(own)) for own in samples]
