"""Times decode attention over DeepSeek-V3's compressed cache on this machine's CPU.

    python scripts/benchmarks/latent_attention.py --batch 4 --tokens 2048 --json result.json

128 query heads attend to one key of 576 elements, whose first 512 are the value, so that computing
binds and not reading. The rate is compared with a matmul of the same number of rows in the same
run, with XLA's attention, and with the host's path. Figures are medians of alternating runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import HostAttention, HostBlock, kernels_of_device
from flexgen_jax.layers.kernels import XlaKernels
from flexgen_jax.models.parts import LatentAttentionSpec

SPEC = LatentAttentionSpec(
    num_heads=128,
    num_kv_heads=1,
    head_dim=576,
    scale=192**-0.5,
    q_rank=1536,
    kv_rank=512,
    plain=128,
    rotated=64,
    value=128,
)
"""DeepSeek-V3's attention."""


def runs(batch: int, tokens: int, dtype: str) -> dict[str, tuple[Callable[[], Any], float]]:
    """Returns the timed functions by name, and their FLOPs."""
    kernels, keys = kernels_of_device(), jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], SPEC.query_shape(batch), dtype) * SPEC.scale
    block = jax.random.normal(keys[1], (batch, 1, tokens, SPEC.head_dim), dtype)
    x = jax.random.normal(keys[2], (SPEC.num_heads, SPEC.head_dim), dtype)
    matrix = jax.random.normal(keys[3], (batch * tokens, SPEC.head_dim), dtype)
    where = (jnp.zeros(1, jnp.int32), jnp.int32(tokens), jnp.zeros(batch, jnp.int32))
    pairs = ((block, block),)
    ours, xla = (
        jax.jit(partial(each.decode_attention, spec=SPEC))
        for each in (kernels, XlaKernels(kernels.sizes, kernels.tuning))
    )
    product = jax.jit(lambda x, kernel: kernels.matmul(x, kernel, None))
    host, rows = HostAttention(), np.asarray(query)
    there, first = [HostBlock(0, (block,))], np.zeros(batch, np.int32)
    flops = 2.0 * batch * SPEC.num_heads * tokens * (SPEC.head_dim + SPEC.kv_rank)
    return {
        "device": (lambda: ours(query, pairs, *where), flops),
        "xla": (lambda: xla(query, pairs, *where), flops),
        "host": (lambda: host.attend(rows, there, tokens, first, SPEC), flops),
        "product": (lambda: product(x, matrix), 2.0 * x.size * len(matrix)),
    }


def measure(batch: int, tokens: int, dtype: str, repeat: int) -> dict[str, float]:
    """Returns the GFLOP/s of each way, and the shares of the product's that attention reaches."""
    ways = runs(batch, tokens, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, repeat):
        for name, (run, _) in ways.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            if turn >= 0:  # the first turn compiles
                seconds[name].append(time.perf_counter() - started)
    rates = {name: ways[name][1] / float(np.median(s)) / 1e9 for name, s in seconds.items()}
    shares = {f"{name}_share": rates[name] / rates["product"] for name in ("device", "host")}
    return rates | shares


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each in the cache")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    rates = measure(options.batch, options.tokens, options.dtype, options.repeat)
    result = {**vars(options), "json": None, **rates}
    for name, value in rates.items():
        print(f"{name:13} {value:8.2f}" + ("" if name.endswith("share") else " GFLOP/s"))
    if options.json is not None:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
