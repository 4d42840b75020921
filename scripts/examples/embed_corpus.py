"""Embeds every line of a file by a transformer that is larger than the memory.

    python scripts/examples/embed_corpus.py README.md --output vectors.npy --layers 24 --width 1024

All lines go through a layer before the next layer is loaded, so the weights are read once for the
whole corpus; what lies between two layers is kept in tiers, too (FlexGen, section 3: a schedule by
columns). The model has random weights: replace `layers` with your own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from flexgen_jax.offloading import Placement, TieredArrays, TieredParams

HEADS, BYTES = 8, 256


class Block(linen.Module):
    """Attends in both directions, to bytes that are not padding."""

    @linen.compact
    def __call__(self, x: jax.Array, is_text: jax.Array) -> jax.Array:
        mask = linen.make_attention_mask(is_text, is_text)
        x += linen.MultiHeadDotProductAttention(HEADS)(linen.LayerNorm()(x), mask=mask)
        wide = linen.gelu(linen.Dense(4 * x.shape[-1])(linen.LayerNorm()(x)))
        return x + linen.Dense(x.shape[-1])(wide)


APPLY = jax.jit(Block().apply)


def layers(count: int, width: int) -> Iterator[tuple[str, Any]]:
    """Yields layers of random weights, one at a time."""
    sizes = jnp.zeros((1, 1, width)), jnp.ones((1, 1), bool)
    init = jax.jit(lambda key: Block().init(key, *sizes))
    for number in range(count):
        yield f"layer {number}", init(jax.random.key(number))


def batches(lines: Sequence[str], rows: int, tokens: int) -> Iterator[np.ndarray]:
    """Yields lines as bytes, int32 [rows, tokens], -1 after the end of each."""
    for start in range(0, len(lines), rows):
        ids = np.full((rows, tokens), -1, np.int32)
        for row, line in enumerate(lines[start : start + rows]):
            content = line.encode()[:tokens]
            ids[row, : len(content)] = np.frombuffer(content, np.uint8)
        yield ids


def embed(
    params: TieredParams, hidden: TieredArrays, table: jax.Array, given: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns a vector of each row of all batches, [row, width]."""
    for number, ids in enumerate(given):
        hidden.put(str(number), table[np.maximum(ids, 0)])
    for _, layer in params.stream():
        for name, x in hidden.stream():
            hidden.put(name, APPLY(layer, x, given[int(name)] >= 0))
    vectors = []
    for name, x in hidden.stream():
        is_text = (given[int(name)] >= 0)[..., None]
        vectors.append(np.asarray((x * is_text).sum(1) / np.maximum(is_text.sum(1), 1)))
    return np.concatenate(vectors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--output", type=Path, default=Path("vectors.npy"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--host", type=float, default=0.0, help="share of all in memory")
    args = parser.parse_args()
    lines = [line for line in args.file.read_text().splitlines() if line.strip()]
    given = [*batches(lines, args.rows, args.tokens)]
    table = jax.random.normal(jax.random.key(99), (BYTES, args.width))
    where, began = Placement(0.0, args.host), time.perf_counter()
    with (
        TieredParams(layers(args.layers, args.width), where) as params,
        TieredArrays(where) as hidden,
    ):
        print(f"{sum(params.nbytes.values()) / 1e9:.2f} GB are placed")
        vectors = embed(params, hidden, table, given)[: len(lines)]
    np.save(args.output, vectors)
    print(f"{len(lines)} lines in {time.perf_counter() - began:.1f} s: {args.output}")


if __name__ == "__main__":
    main()
