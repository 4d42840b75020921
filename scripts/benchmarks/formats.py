"""Times products with kernel weights in published formats, by the CPU's own code and by XLA's.

    python scripts/benchmarks/formats.py --rows 1 4 32

Kernel weights are random, [11264, 2048] or [4096, 5632] (--shape), rows are bfloat16. "own" rounds
nothing, "rounded" rounds rows to 8-bit integers, as `--matmul-bits 8` does where that is faster.
Milliseconds, the fastest of some runs, which alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import features
from flexgen_jax.cpu.backend import CpuKernels
from flexgen_jax.layers.matmul import matmul
from flexgen_jax.layers.quantization import Kept, assemble
from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.gguf.blocks import BLOCKS
from flexgen_jax.policy.hardware import KernelSizes

FORMATS: dict[str, Format | None] = {
    "bfloat16": None,
    "own 4": own(4),
    "own 8": own(8),
    **{
        name: BLOCKS[name].format
        for name in ("Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
    },
    "NVFP4": Format(4, Factor("e4m3", 16, of=Factor("float32", 0, rows=0)), levels="e2m1"),
    "nf4": Format(4, Factor("float32", 64), levels="nf4"),
    "FP8, blocks": Format(8, Factor("float32", 128, rows=128), levels="e4m3"),
    "FP8, rows": Format(8, Factor("bfloat16", 0), levels="e4m3"),
}
PART_BYTES = 1 << 25
"""Of a kernel that XLA unpacks at a time."""


def random_kernel(shape: tuple[int, int], packing: Format | None) -> Kept:
    """Returns kernel weights of random codes and small factors."""
    rng = np.random.default_rng(0)
    if packing is None:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    storage, leaves = Storage(shape, "bfloat16", packing), []
    for leaf in storage.leaves:
        if leaf.dtype == "e8m0":
            array = np.full(leaf.shape, 119)
        elif leaf.kind in ("uint8", "int8"):
            array = rng.integers(0, 112, leaf.shape)
        else:
            array = 0.01 * rng.random(leaf.shape)
        leaves.append(jnp.asarray(array, leaf.kind))
    kept: Kept = assemble(storage, leaves)
    return kept


def fastest_ms(ways: list[Callable[..., Any]], x: jax.Array, kernel: Kept) -> list[float]:
    """Returns the milliseconds of the fastest product of each way."""
    compiled = [jax.jit(way) for way in ways]
    seconds = [float("inf")] * len(ways)
    for turn in range(1 + (20 if x.shape[0] <= 32 else 5)):
        for index, multiply in enumerate(compiled):
            started = time.perf_counter()
            multiply(x, kernel).block_until_ready()
            if turn:  # the first one compiles
                seconds[index] = min(seconds[index], time.perf_counter() - started)
    return [1e3 * each for each in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--shape", type=int, nargs=2, default=[11264, 2048])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    args = parser.parse_args()
    kernels, rng = CpuKernels(KernelSizes()), np.random.default_rng(1)
    ways = [
        partial(kernels.matmul, bias=None),
        partial(kernels.matmul, bias=None, bits=8),
        lambda x, kernel: matmul(x, kernel, None, PART_BYTES).astype(x.dtype),
    ]
    print(f"units: {features()}; kernel weights {args.shape}")
    print("| format | rows | own | rounded | XLA |\n| --- | --- | --- | --- | --- |")
    for name in args.formats:
        kernel = random_kernel((args.shape[0], args.shape[1]), FORMATS[name])
        for rows in args.rows:
            x = jnp.asarray(rng.standard_normal((rows, args.shape[1])), jnp.bfloat16)
            times = " | ".join(f"{ms:.2f}" for ms in fastest_ms(ways, x, kernel))
            print(f"| {name} | {rows} | {times} |", flush=True)


if __name__ == "__main__":
    main()
