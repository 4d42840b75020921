"""Times products with kernel weights in published formats, by the CPU's own code and by XLA's.

    python scripts/benchmarks/formats.py --rows 1 4 32

Kernel weights are random, of `--shape`, and several matrices are taken in turn, so that they come
from memory; rows are bfloat16. "own" rounds nothing, "rounded" rounds rows to 8-bit integers, as
`--matmul-bits 8` does where that is faster. Milliseconds; the ways alternate.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import features, is_cpu, kernels_of_device
from flexgen_jax.layers.kernels import XlaKernels
from flexgen_jax.layers.quantization import Kept, assemble
from flexgen_jax.machine.product_probe import compiled_product, median_seconds
from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.lanes import in_lanes
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.gguf.blocks import BLOCKS
from flexgen_jax.models.weight_source import random_leaves

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
MATRICES = 4


def random_kernel(shape: tuple[int, int], packing: Format | None, seed: int) -> Kept:
    """Returns kernel weights of random codes and small factors."""
    rng = np.random.default_rng(seed)
    if packing is None:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    storage = Storage(shape, "bfloat16", packing)
    storage = in_lanes(storage) if is_cpu() else storage  # as in runs
    kept: Kept = assemble(storage, [jnp.asarray(leaf) for leaf in random_leaves(storage, rng)])
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--shape", type=int, nargs=2, default=[11264, 2048])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--turns", type=int, default=5, help="Of all matrices.")
    args = parser.parse_args()
    ours = kernels_of_device()
    theirs = XlaKernels(ours.sizes, ours.tuning)
    columns, depth = args.shape
    print(f"units: {features()}; kernel weights {args.shape}")
    print("| format | rows | own | rounded | XLA |\n| --- | --- | --- | --- | --- |")
    for name in args.formats:
        packing = FORMATS[name]
        matrices = [random_kernel((columns, depth), packing, seed) for seed in range(MATRICES)]
        bits = 16 if packing is None else packing.bits
        for rows in args.rows:
            x = jax.random.normal(jax.random.key(rows), (rows, depth), jnp.bfloat16)
            ways = [
                compiled_product(ours, x, matrices[0], bits),
                compiled_product(ours, x, matrices[0], bits, matmul_bits=8),
                compiled_product(theirs, x, matrices[0], bits),
            ]
            seconds = median_seconds(ways, x, matrices, args.turns)
            times = " | ".join(f"{1e3 * each:.2f}" for each in seconds)
            print(f"| {name} | {rows} | {times} |", flush=True)


if __name__ == "__main__":
    main()
