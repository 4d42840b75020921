"""Trains a transformer whose weights and Adam moments lie on disk, layer by layer.

    python scripts/examples/train_offloaded.py --layers 24 --width 2048 --steps 2

A step goes through the layers twice. On the way up, the input of each layer is kept, on the host or
the disk too; on the way down, a layer is computed again, its gradient is taken, and Adam changes
the layer at once, so that gradients of one layer are in memory at a time. The table of bytes stays
in memory. The text is this file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flexgen_jax.offloading import Placement, TieredArrays, TieredParams
from stream_layers import LinenBlock, linen_layers

BYTES = 256
ADAM = optax.adam(3e-4)
APPLY = LinenBlock().apply
FORWARD = jax.jit(APPLY)


class Table(NamedTuple):
    """The table of bytes, which is the head, too, and its moments."""

    table: jax.Array
    moments: Any


def first_moments(count: int, width: int) -> Iterator[tuple[str, Any]]:
    """Yields Adam's state of each layer before the first step."""
    for name, layer in linen_layers(count, width)[0]:
        yield name, ADAM.init(layer)


def first_table(width: int) -> Table:
    table = jax.random.normal(jax.random.key(99), (BYTES, width)) * 0.02
    return Table(table, ADAM.init(table))


def loss_of(table: jax.Array, x: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the next bytes."""
    logits = x[:, :-1] @ table.T
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    return losses.mean()


@jax.jit
def head(table: jax.Array, x: jax.Array, ids: jax.Array) -> Any:
    """Returns the loss, and its gradients for the table and x."""
    return jax.value_and_grad(loss_of, argnums=(0, 1))(table, x, ids)


@partial(jax.jit, donate_argnums=3)
def update(layer: Any, moments: Any, x: jax.Array, gradient: jax.Array) -> Any:
    """Returns a layer after Adam's step, its moments, and the gradient of its input."""
    _, pull = jax.vjp(APPLY, layer, x)
    of_layer, of_input = pull(gradient)
    changes, moments = ADAM.update(of_layer, moments)
    return optax.apply_updates(layer, changes), moments, of_input


@jax.jit
def update_table(state: Table, of_head: jax.Array, of_input: jax.Array, ids: jax.Array) -> Table:
    gradient = of_head.at[ids].add(of_input)
    changes, moments = ADAM.update(gradient, state.moments)
    return Table(optax.apply_updates(state.table, changes), moments)


def step(
    params: TieredParams, moments: TieredParams, inputs: TieredArrays, state: Table, ids: jax.Array
) -> tuple[float, Table]:
    """Trains on some texts, ids [batch, token]; returns the loss before, and the table after."""
    x = state.table[ids]
    for name, layer in params.stream(ahead=1):
        inputs.put(name, x)
        x = FORWARD(layer, x)
    loss, (of_head, gradient) = head(state.table, x, ids)
    downwards = [*reversed([*params])]
    streams = (each.stream(downwards, ahead=0) for each in (params, moments, inputs))
    for (name, layer), (_, moment), (_, x) in zip(*streams, strict=True):
        layer, moment, gradient = update(layer, moment, x, gradient)
        params.put(name, layer)
        moments.put(name, moment)
    return float(loss), update_table(state, of_head, gradient, ids)


def texts(count: int, tokens: int, number: int) -> jax.Array:
    """Returns pieces of this file as bytes, [count, tokens]."""
    content = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(number).integers(0, content.size - tokens, count)
    return jnp.asarray(np.stack([content[start : start + tokens] for start in starts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--host", type=float, default=0.0, help="share in memory, of all three")
    parser.add_argument("--folder", help="of what lies on disk")
    args = parser.parse_args()
    shape, where = (args.layers, args.width), Placement(0.0, args.host)
    with (
        TieredParams(linen_layers(*shape)[0], where, folder=args.folder) as params,
        TieredParams(first_moments(*shape), where, folder=args.folder) as moments,
        TieredArrays(where, folder=args.folder) as inputs,
    ):
        state = first_table(args.width)
        print(f"{(sum(params.nbytes.values()) + sum(moments.nbytes.values())) / 1e9:.1f} GB")
        for number in range(args.steps):
            began = time.perf_counter()
            loss, state = step(
                params, moments, inputs, state, texts(args.batch, args.tokens, number)
            )
            print(f"step {number}: loss {loss:.4f}, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
