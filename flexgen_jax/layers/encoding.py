"""Encoding of weights into this package's own formats; see `models/formats/known.py`.

Scale and minimum of a group minimize the squared error. It may be weighted by the magnitude of each
element's input, which matters most (Lin et al. 2024, "AWQ", section 3).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from flexgen_jax.layers.quantization import Kept, assemble, pack, quantize_as
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.storage import Storage

WIDEST, NARROWEST, TRIES = 1.0, 0.82, 3
"""A group's range is tried at these multiples of its own, and between."""

ROUNDS = 2
"""How often scale and minimum are fitted to codes, and codes to them."""


def encoded(x: jax.Array, storage: Storage) -> Kept:
    """Returns an array as `storage` keeps it; a format must be one that is written here."""
    if storage.format is None:
        return x
    packing = storage.format
    is_own = replace(packing, in_lanes=False) in (own(4), own(8))
    array: Kept = assemble(storage, encode_rows(x, storage)) if is_own else quantize_as(x, storage)
    return array


@partial(jax.jit, static_argnames="storage")
def encode_rows(
    x: jax.Array, storage: Storage, weights: jax.Array | None = None
) -> list[jax.Array]:
    """Returns the leaves of a matrix [row, element].

    storage: of x, in an own format; weights: fp32 [element], the weight of each element's error in
    a row, None for equal weights.
    """
    wide = _grouped(jnp.clip(x.astype(jnp.float32), -3e38, 3e38), storage.group_size)
    if storage.packing.minimum is None:
        return _centered(wide, x, storage)
    if weights is None:
        counts = jnp.ones((1, *wide.shape[1:]), jnp.float32)
    else:
        counts = _grouped(weights[None].astype(jnp.float32), storage.group_size)
        counts = jnp.maximum(counts, 1e-12 * jnp.max(counts))
    step, least = _searched(wide, counts, (1 << storage.bits) - 1)
    scale, unit = _in_units(step, 255)
    minimum, offset = _in_units(least, 127)
    step = _finite(scale.astype(jnp.float32) * unit.astype(jnp.float32))
    least = minimum.astype(jnp.float32) * offset.astype(jnp.float32)
    codes = _codes(wide, step, least, (1 << storage.bits) - 1)
    codes = codes.reshape(x.shape[0], -1)[:, : x.shape[1]].astype(jnp.uint8)
    leaves = (scale.astype(jnp.uint8), unit, minimum.astype(jnp.int8), offset)
    return [*pack(codes, storage), *leaves]


def _centered(wide: jax.Array, x: jax.Array, storage: Storage) -> list[jax.Array]:
    """Rounds to symmetric integers; the largest integer is the group's largest magnitude."""
    middle = storage.packing.center
    largest = jnp.max(jnp.abs(wide), axis=2)
    scale = (largest / (middle - 1)).astype(jnp.bfloat16)
    step = _finite(scale.astype(jnp.float32))
    codes = jnp.clip(jnp.round(wide / step[..., None]), 1 - middle, middle - 1) + middle
    codes = codes.reshape(x.shape[0], -1)[:, : x.shape[1]].astype(jnp.uint8)
    return [*pack(codes, storage), scale]


def _grouped(x: jax.Array, group: int) -> jax.Array:
    """Returns [row, group, element]; the last group is filled up with its last element."""
    short = -x.shape[1] % group
    padded = jnp.pad(x, ((0, 0), (0, short)), mode="edge") if short else x
    return padded.reshape(x.shape[0], -1, group)


def _searched(x: jax.Array, counts: jax.Array, levels: int) -> tuple[jax.Array, jax.Array]:
    """Returns the scale and the minimum of each group, fp32 [row, group], with the least error of
    those that were tried."""
    low, high = jnp.min(x, axis=2), jnp.max(x, axis=2)
    middle, half = (low + high) / 2, (high - low) / 2

    def attempt(number: int, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        share = WIDEST + (NARROWEST - WIDEST) * number / (TRIES - 1)
        step, least = _finite(2 * half * share / levels), middle - half * share
        for _ in range(ROUNDS):
            step, least = _fitted(x, _codes(x, step, least, levels), counts, step, least)
        codes = _codes(x, step, least, levels)
        error = jnp.sum(counts * (x - codes * step[..., None] - least[..., None]) ** 2, axis=2)
        is_better = error < best[0]
        candidate = (error, step, least)
        return tuple(jnp.where(is_better, a, b) for a, b in zip(candidate, best, strict=True))

    none = jnp.full(low.shape, jnp.inf, jnp.float32)
    _, step, least = jax.lax.fori_loop(0, TRIES, attempt, (none, _finite(0 * half), low))
    # A group of equal elements must not set the unit of its row's steps.
    return jnp.where(half > 0, step, 0.0), least


def _fitted(
    x: jax.Array, codes: jax.Array, counts: jax.Array, step: jax.Array, least: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns scale and minimum of the line through x over its codes with the least squares; those
    given where all codes are one."""
    total = jnp.sum(counts * jnp.ones_like(x), axis=2)
    mean_code, mean_x = (jnp.sum(counts * v, axis=2) / total for v in (codes, x))
    away = codes - mean_code[..., None]
    spread = jnp.sum(counts * away**2, axis=2)
    slope = jnp.sum(counts * away * (x - mean_x[..., None]), axis=2) / jnp.maximum(spread, 1e-30)
    is_line = (spread > 1e-6 * total) & (slope > 0)
    fitted = jnp.where(is_line, slope, step)
    return fitted, jnp.where(is_line, mean_x - fitted * mean_code, least)


def _codes(x: jax.Array, step: jax.Array, least: jax.Array, levels: int) -> jax.Array:
    return jnp.clip(jnp.round((x - least[..., None]) / step[..., None]), 0, levels)


def _in_units(values: jax.Array, maximum: int) -> tuple[jax.Array, jax.Array]:
    """Returns values as integers of at most `maximum`, and the unit of each row, bfloat16 [row,
    1]."""
    unit = jnp.max(jnp.abs(values), axis=1, keepdims=True) / maximum
    rounded = (unit * (1 + 2.0**-8)).astype(jnp.bfloat16)  # rounded up, so that all fit
    return jnp.clip(
        jnp.round(values / _finite(rounded.astype(jnp.float32))), -maximum, maximum
    ), rounded


def _finite(step: jax.Array) -> jax.Array:
    """Returns steps that can be divided by."""
    return jnp.where(step > 0, step, 1.0)
