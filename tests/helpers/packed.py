"""Formats of weights that are grouped along their input, and random kernels in them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers.quantization import QuantizedArray, assemble
from flexgen_jax.models.formats.format import Factor, Format, affine, centered
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.gguf.blocks import BLOCKS

FORMATS = {
    "own": own(4),
    "own-8": own(8),
    "Q4_0": centered(4, 32, "float16"),
    "Q4_1": affine(4, 32, dtype="float16"),
    "Q4_K": BLOCKS["Q4_K"].format,
    **{name: BLOCKS[name].format for name in ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q3_K", "Q2_K")},
    "NVFP4": Format(4, Factor("e4m3", 16, of=Factor("float32", 0, rows=0)), levels="e2m1"),
    "groups-of-16": affine(8, 16, dtype="bfloat16"),
    "MXFP4": Format(4, Factor("e8m0", 32), levels="e2m1"),
    "nf4": Format(4, Factor("float32", 64), levels="nf4"),
    "gptq": Format(4, Factor("float16", 128), zero=Factor("codes", 128, bits=4)),
    "gptq-8": Format(8, Factor("float16", 128), zero=Factor("codes", 128, bits=8)),
    "gptq-2": Format(2, Factor("float16", 64), zero=Factor("codes", 64, bits=2)),
    "act-order": Format(4, Factor("float16", 64), center=8, has_order=True),
    "int8": Format(8, Factor("bfloat16", 0), center=128),
    "fp8": Format(8, Factor("float32", 128, rows=128), levels="e4m3"),
    "fp8-powers": Format(8, Factor("e8m0", 128, rows=128), levels="e4m3"),
    "fp8-rows": Format(8, Factor("bfloat16", 0), levels="e4m3"),
    "fp8-all": Format(8, Factor("float32", 0, rows=0), levels="e4m3"),
}

FINITE = np.array([code for code in range(256) if code & 0x7F < 0x7C], np.uint8)
"""Codes that stand for a finite number, of E4M3 and of E5M2."""


def random_kernel(shape: tuple[int, int], packing: Format, seed: int = 0) -> QuantizedArray:
    """A matrix of random codes and factors."""
    rng, leaves = np.random.default_rng(seed), []
    storage = Storage(shape, "bfloat16", packing)
    for leaf in storage.leaves:
        if leaf.name == "order":
            array = rng.permutation(leaf.shape[0]).astype(np.int32)
        elif leaf.dtype == "e8m0":
            array = rng.integers(119, 123, leaf.shape).astype(np.uint8)
        elif leaf.dtype == "e4m3":
            array = rng.integers(0x28, 0x40, leaf.shape, np.uint8)
        elif leaf.name == "packed" and packing.levels in ("e4m3", "e5m2"):
            array = rng.choice(FINITE, leaf.shape)
        elif leaf.kind == "uint8":
            array = rng.integers(0, 256, leaf.shape, np.uint8)
        elif leaf.kind == "int8":
            array = rng.integers(-128, 128, leaf.shape).astype(np.int8)
        else:
            array = 0.01 * rng.random(leaf.shape)
        leaves.append(jnp.asarray(array, leaf.kind))
    kept: QuantizedArray = assemble(storage, leaves)
    return kept
