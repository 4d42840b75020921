"""Runs a Flax transformer of one's own, whose layers lie on disk, host and device.

    python scripts/examples/stream_layers.py --layers 24 --width 2048 --host 0.2 --api nnx

The layers have random weights and are made one at a time, so that at most one is in memory. They
are streamed: while one computes, the next ones are read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flexgen_jax.offloading import Placement, TieredParams

HEADS = 8
Apply = Callable[[Any, jax.Array], jax.Array]


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = linen.make_causal_mask(x[..., 0])
        x += linen.MultiHeadDotProductAttention(HEADS)(linen.LayerNorm()(x), mask=mask)
        wide = linen.gelu(linen.Dense(4 * x.shape[-1])(linen.LayerNorm()(x)))
        return x + linen.Dense(x.shape[-1])(wide)


class NnxBlock(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def linen_layers(count: int, width: int) -> tuple[Iterator[tuple[str, Any]], Apply]:
    """Returns an iterator of layers, and a function that applies a layer."""
    block = LinenBlock()
    init = jax.jit(lambda key: block.init(key, jnp.zeros((1, 1, width))))
    layers = ((f"layer {n}", init(jax.random.key(n))) for n in range(count))
    return layers, jax.jit(block.apply)


def nnx_layers(count: int, width: int) -> tuple[Iterator[tuple[str, Any]], Apply]:
    """The same with Flax's newer interface."""
    definition = nnx.graphdef(nnx.eval_shape(lambda: NnxBlock(width, nnx.Rngs(0))))
    layers = ((f"layer {n}", nnx.state(NnxBlock(width, nnx.Rngs(n)))) for n in range(count))
    return layers, jax.jit(lambda state, x: nnx.merge(definition, state)(x))


def run(params: TieredParams, apply: Apply, x: jax.Array) -> jax.Array:
    """Returns the layers' output for x, [batch, token, width]."""
    for _, layer in params.stream():
        x = apply(layer, x)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", type=float, default=0.0, help="share of the weights there")
    parser.add_argument("--host", type=float, default=0.0, help="share of the weights there")
    parser.add_argument("--api", choices=("linen", "nnx"), default="linen")
    args = parser.parse_args()
    layers_of = linen_layers if args.api == "linen" else nnx_layers
    layers, apply = layers_of(args.layers, args.width)
    x = jax.random.normal(jax.random.key(0), (1, args.tokens, args.width))
    with TieredParams(layers, Placement(args.device, args.host)) as params:
        print({tier: f"{size / 1e9:.2f} GB" for tier, size in params.nbytes.items()})
        print("at most", {t: f"{size / 1e9:.2f} GB" for t, size in params.peak_bytes().items()})
        for _ in range(2):
            began = time.perf_counter()
            out = run(params, apply, x).block_until_ready()
            print(f"{out.mean():.4f} in {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
