"""Times quantized products on this machine, beside the plain product and the memory's speed.

    python scripts/benchmark_kernels.py --json result.json

The matrices are those of one decoder layer (four of hidden x hidden, two of hidden x 4 hidden).
A run walks over several layers' own weights, as a model does, so that they come from memory and
not from a cache. Every figure is a median; plain and quantized take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers.linear import dense
from flexgen_jax.layers.quantization import Array, quantize, unpack
from flexgen_jax.offload.machine import tune_allocator

LAYERS = 4
Layer = list[Array]


def layer_weights(hidden: int, seed: int) -> list[jax.Array]:
    shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.bfloat16) * 0.02
        for key, shape in zip(keys, shapes, strict=True)
    ]


def products(x: jax.Array, weights: Layer) -> jax.Array:
    """The layer's six products, one depending on the other as in a model."""
    q, k, v = (dense(x, kernel).astype(jnp.bfloat16) for kernel in weights[:3])
    x = dense(q + k + v, weights[3]).astype(jnp.bfloat16)
    up = jax.nn.relu(dense(x, weights[4])).astype(jnp.bfloat16)
    return dense(up, weights[5]).astype(jnp.bfloat16)


def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - started, result


def copy_bandwidth() -> float:
    """Bytes a second of a large copy, read and write counted (as in STREAM)."""
    source = np.ones(1 << 27, np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(seconds)


def measure(hidden: int, rows: list[int], bits: int, repeat: int) -> list[dict[str, Any]]:
    """One row of figures for each number of rows of the input."""
    plain = [layer_weights(hidden, seed) for seed in range(LAYERS)]
    packed = [[quantize(kernel, bits, axis=0) for kernel in layer] for layer in plain]
    product = jax.jit(products)
    # As the executor does it: into the memory of the layer before.
    unpacked = jax.jit(
        lambda layer, into: [unpack(kernel) for kernel in layer], donate_argnums=1, keep_unused=True
    )
    into = jax.tree.map(jnp.zeros_like, [unpack(kernel) for kernel in packed[0]])
    found = []
    for count in rows:
        x = jnp.ones((count, hidden), jnp.bfloat16)
        samples: dict[str, list[float]] = {"plain": [], "unpack": [], "product": []}
        for turn in range(-1, repeat):
            for layer in range(LAYERS):
                plain_s, _ = timed(product, x, plain[layer])
                unpack_s, into = timed(unpacked, packed[layer], into)
                product_s, _ = timed(product, x, into)
                if turn >= 0:  # the first turn compiles
                    for name, value in zip(samples, (plain_s, unpack_s, product_s), strict=True):
                        samples[name].append(value)
        plain_s, unpack_s, product_s = (float(np.median(value)) for value in samples.values())
        elements = sum(kernel.size for kernel in plain[0])
        found.append(
            {
                "rows": count,
                "plain_ms": 1e3 * plain_s,
                "unpack_ms": 1e3 * unpack_s,
                "product_ms": 1e3 * product_s,
                "ratio": (unpack_s + product_s) / plain_s,
                "unpack_gelements_s": elements / unpack_s / 1e9,
                "unpack_gb_s": elements * (2 + bits / 8) / unpack_s / 1e9,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 512, 2048])
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tune_allocator()
    bandwidth = copy_bandwidth()
    found = measure(args.hidden, args.rows, args.bits, args.repeat)
    print(f"memory copy {bandwidth / 1e9:.1f} GB/s, one thread, read and write counted")
    print("| rows | plain ms | unpack ms | product ms | unpack + product / plain | unpack GB/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in found:
        cells = [f"{row[key]:.1f}" for key in ("plain_ms", "unpack_ms", "product_ms")]
        cells += [f"{row['ratio']:.2f}", f"{row['unpack_gb_s']:.1f}"]
        print(f"| {row['rows']} | " + " | ".join(cells) + " |")
    if args.json:
        content = {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "jax": version("jax"),
            "copy_gb_s": bandwidth / 1e9,
            "bits": args.bits,
            "rows": found,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
