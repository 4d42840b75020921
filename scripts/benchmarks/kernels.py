"""Times quantized products and decode attention on this machine, relative to the memory's speed.

    python scripts/benchmarks/kernels.py --json result.json

The matrices are those of one decoder layer (four of hidden x hidden, two of hidden x 4 hidden). A
run walks over the weights of several layers, as a model does, so that they come from memory and not
from a cache. Every figure is a median. Plain products, quantized ones, and quantized ones of 8-bit
integers alternate, each computed as in the device's programs. Attention is that of 16 sequences of
32 heads: on the host's path, also to the values of 10 % of the tokens only; on the device's path if
the device is the CPU; and PyTorch's, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import HostAttention, HostBlock, kernels_of_device
from flexgen_jax.layers.attention import attend
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.quantization import Kept, quantize, quantize_as
from flexgen_jax.models.formats.storage import kv_storage
from flexgen_jax.models.parts import AttentionSpec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.offload.allocator import tune_allocator

LAYERS = 4
KV_SHAPE = (16, 32, 64)
"""Sequences, heads and head dimension in the benchmark of attention."""

KV_FORMATS = (("float32", 16), ("bfloat16", 16), ("bfloat16", 8), ("bfloat16", 4))

Layer = list[Kept]


def layer_weights(hidden: int, seed: int) -> list[jax.Array]:
    shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.bfloat16) * 0.02
        for key, shape in zip(keys, shapes, strict=True)
    ]


def products(kernels: Kernels, bits: int, x: jax.Array, weights: Layer) -> jax.Array:
    """Computes a layer's six matmuls, each depending on the previous one as in a model.

    The numbers have the size that layer norms give them, so products of integers have hardly any
    outliers.
    """

    def dense(x: jax.Array, kernel: Kept) -> jax.Array:
        return kernels.matmul(x, kernel, None, bits)

    q, k, v = (dense(x, kernel) for kernel in weights[:3])
    x = dense(jax.nn.standardize(q + k + v), weights[3])
    x = dense(jax.nn.standardize(x), weights[4])
    return dense(jax.nn.relu(x), weights[5])


def compiled(x: jax.Array, layer: Layer, formats: Formats) -> jax.stages.Compiled:
    """Compiles `products` as the model's programs are compiled."""
    kernels = kernels_of_device()
    lowered = jax.jit(partial(products, kernels, formats.matmul_bits)).lower(x, layer)
    return lowered.compile(compiler_options=kernels.compiler_options(formats))


def timed(function: Callable[..., Any], *args: Any) -> float:
    started = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - started


def copy_bandwidth() -> float:
    """Measures a large copy on all cores, in bytes per second, reads and writes counted (as in
    STREAM)."""
    cores = os.cpu_count() or 1
    source = np.ones((cores, 1 << 27), np.uint8)
    target = np.empty_like(source)
    seconds = []
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.copyto, target, source))
            seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(seconds)


def measure(hidden: int, rows: list[int], bits: int, repeat: int) -> list[dict[str, Any]]:
    """Returns one row of figures for each number of rows of the input."""
    plain = [layer_weights(hidden, seed) for seed in range(LAYERS)]
    packed = [[quantize(kernel, bits, axis=0) for kernel in layer] for layer in plain]
    found = []
    for count in rows:
        x = jax.random.normal(jax.random.key(count), (count, hidden), jnp.bfloat16)
        ways = [
            (compiled(x, layers[0], Formats("bfloat16", kept, matmul_bits=matmul_bits)), layers)
            for layers, kept, matmul_bits in (
                (plain, 16, 16),
                (packed, bits, 16),
                (packed, bits, 8),
            )
        ]
        samples: list[list[float]] = []
        for turn in range(-1, repeat):
            for layer in range(LAYERS):
                found_s = [timed(product, x, layers[layer]) for product, layers in ways]
                if turn >= 0:  # the first turn warms up
                    samples.append(found_s)
        plain_s, quantized_s, integers_s = (float(x) for x in np.median(samples, axis=0))
        elements = sum(kernel.size for kernel in plain[0])
        found.append(
            {
                "rows": count,
                "plain_ms": 1e3 * plain_s,
                "quantized_ms": 1e3 * quantized_s,
                "integers_ms": 1e3 * integers_s,
                "ratio": quantized_s / plain_s,
                "integers_ratio": integers_s / quantized_s,
                "plain_gb_s": 2 * elements / plain_s / 1e9,
                "plain_gflop_s": 2 * elements * count / plain_s / 1e9,
            }
        )
    return found


def attention_runs(dtype: str, bits: int, tokens: int) -> dict[str, Callable[[Any, Any], object]]:
    """Returns functions of a key and a value, [batch, head, token, head_dim], by name."""
    query = jnp.ones((*KV_SHAPE[:2], 1, KV_SHAPE[2]), dtype)
    valid, first = jnp.ones((KV_SHAPE[0], tokens), bool), np.zeros(KV_SHAPE[0], np.int32)
    device = jax.jit(partial(attend, tuning=kernels_of_device().tuning))
    host, rows = HostAttention(), np.asarray(query.astype(jnp.float32))
    counts = np.full(KV_SHAPE[0], -(-tokens // 10), np.int32)
    where = (tokens, first, AttentionSpec(KV_SHAPE[1], KV_SHAPE[1], KV_SHAPE[2]))
    runs: dict[str, Callable[[Any, Any], object]] = {
        "host": lambda k, v: host.attend(rows, [HostBlock(0, (k, v))], *where),
        "sparse": lambda k, v: host.attend_top(
            rows, [HostBlock(0, (k, v))], *where, counts, None, None
        ),
        "device": lambda k, v: jax.block_until_ready(device(query, k, v, valid)),
    }
    if bits == 16 and find_spec("torch"):
        # Otherwise PyTorch's idle threads would spin while others are timed.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch

        question = torch.ones(query.shape, dtype=getattr(torch, dtype))
        product = torch.nn.functional.scaled_dot_product_attention
        runs["torch"] = lambda k, v: product(question, *map(torch.from_dlpack, (k, v)))
    return runs


def measure_attention(
    dtype: str, bits: int, tokens: int, repeat: int, bandwidth: float
) -> dict[str, Any]:
    """Measures each way to attend: milliseconds, GB/s of keys and values, and that relative to the
    copy."""
    shape = (*KV_SHAPE[:2], tokens, KV_SHAPE[2])
    keys = jax.random.split(jax.random.key(0), 4)
    sides = [jax.random.normal(key, shape, dtype) for key in keys]
    if bits < 16:
        sides = [quantize_as(side, kv_storage(shape, dtype, bits)) for side in sides]
    jax.block_until_ready(sides)
    samples: dict[str, list[float]] = {}
    runs = attention_runs(dtype, bits, tokens)
    for turn in range(-1, repeat):
        # Each turn has several calls: after the first call, the other variant's threads sleep.
        for name, run in runs.items():
            for side in range(len(sides)):
                seconds = timed(run, sides[side], sides[side - 1])
                if turn >= 0:
                    samples.setdefault(name, []).append(seconds)
    found: dict[str, Any] = {"dtype": dtype, "bits": bits, "tokens": tokens}
    for name, seconds in samples.items():
        median = float(np.median(seconds))
        found[f"{name}_ms"] = 1e3 * median
        if name != "sparse":
            found[f"{name}_gb_s"] = 2 * sides[0].nbytes / median / 1e9
    return found | {"host_of_copy": 1e9 * found["host_gb_s"] / bandwidth}


def print_attention(rows: list[dict[str, Any]]) -> None:
    print("| KV | tokens | host ms | GB/s | of the copy | 10 % ms | device path ms | PyTorch ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        kind = row["dtype"] if row["bits"] == 16 else f"{row['bits']} bits"
        cells = [kind, str(row["tokens"]), f"{row['host_ms']:.1f}", f"{row['host_gb_s']:.1f}"]
        cells += [f"{row['host_of_copy']:.2f}", f"{row['sparse_ms']:.1f}"]
        cells += [f"{row[key]:.1f}" if key in row else "" for key in ("device_ms", "torch_ms")]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 512, 2048])
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tune_allocator(has_gpu=False)
    bandwidth = copy_bandwidth()
    found = measure(args.hidden, args.rows, args.bits, args.repeat)
    print(f"memory copy on all cores {bandwidth / 1e9:.1f} GB/s, read and write counted")
    print(
        "| rows | bf16 ms | packed ms | ratio | 8-bit products ms | ratio | GB/s | bf16 GFLOP/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in found:
        cells = [f"{row['plain_ms']:.1f}", f"{row['quantized_ms']:.1f}", f"{row['ratio']:.2f}"]
        cells += [f"{row['integers_ms']:.1f}", f"{row['integers_ratio']:.2f}"]
        cells += [f"{row['plain_gb_s']:.1f}", f"{row['plain_gflop_s']:.0f}"]
        print(f"| {row['rows']} | " + " | ".join(cells) + " |")
    attention = [
        measure_attention(dtype, bits, tokens, args.repeat, bandwidth)
        for dtype, bits in KV_FORMATS
        for tokens in args.tokens
    ]
    print_attention(attention)
    if args.json:
        content = {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "jax": version("jax"),
            "copy_gb_s": bandwidth / 1e9,
            "bits": args.bits,
            "rows": found,
            "attention": attention,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
