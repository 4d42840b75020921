"""Our own formats of weights: what is stored, read by NumPy from the formula, is near what was
given, and nearer than by the extremes of each group."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax.layers.encoding import encode_rows
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.storage import Storage

RNG = np.random.default_rng(0)


def stored(x: np.ndarray, bits: int, weights: np.ndarray | None = None) -> list[np.ndarray]:
    storage = Storage(x.shape, "bfloat16", own(bits))
    given = None if weights is None else jnp.asarray(weights)
    leaves = [np.asarray(leaf) for leaf in encode_rows(jnp.asarray(x), storage, given)]
    assert [(a.shape, str(a.dtype)) for a in leaves] == [(b.shape, b.kind) for b in storage.leaves]
    return leaves


def decoded(x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """4 bits: (scale of 8 bits x the row's unit) x code + (minimum of 8 bits x the row's unit)."""
    packed, scale, unit, minimum, other = stored(x, 4, weights)
    half = packed.shape[1]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1)[:, : x.shape[1]].astype(np.float64)
    assert half * 2 >= x.shape[1]
    step = np.repeat(scale.astype(np.float64) * unit.astype(np.float64), 32, 1)[:, : x.shape[1]]
    least = np.repeat(minimum.astype(np.float64) * other.astype(np.float64), 32, 1)
    return codes * step + least[:, : x.shape[1]]


def plainly_rounded(x: np.ndarray) -> np.ndarray:
    """Each group of 32 rounded to 16 levels between its extremes, which are kept exactly."""
    groups = x.reshape(len(x), -1, 32)
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    step = (high - low) / 15
    return (np.round((groups - low) / step) * step + low).reshape(x.shape)


@pytest.mark.parametrize("columns", [64, 96, 576])
def test_four_bits_are_better_than_extremes(columns: int) -> None:
    x = RNG.normal(size=(40, columns)).astype(np.float32)
    error, plain = (np.mean((back - x) ** 2) for back in (decoded(x), plainly_rounded(x)))
    assert error < 0.9 * plain


def test_what_is_on_a_grid_stays_there() -> None:
    """Weights that some 4-bit format had already are hardly changed."""
    step, low = (0.02 * (0.5 + RNG.random((8, 4))), -0.2 * (0.5 + RNG.random((8, 4))))
    x = RNG.integers(0, 16, (8, 128)) * np.repeat(step, 32, 1) + np.repeat(low, 32, 1)
    errors = (decoded(x.astype(np.float32)) - x) / np.repeat(step, 32, 1)
    assert np.sqrt(np.mean(errors**2)) < 0.15  # of a step; by rounding at random 0.29


def test_elements_that_count_more_are_nearer() -> None:
    x, weights = RNG.normal(size=(200, 64)).astype(np.float32), np.ones(64, np.float32)
    weights[::8] = 100.0
    all_alike, weighted = (np.abs(decoded(x, w) - x)[:, ::8].mean() for w in (None, weights))
    assert weighted < 0.8 * all_alike


@pytest.mark.parametrize("value", [0.0, 0.3, -2.0, 1e-30])
def test_groups_of_one_number(value: float) -> None:
    x = np.full((3, 64), value, np.float32)
    assert np.isfinite(decoded(x)).all()
    np.testing.assert_allclose(decoded(x), x, rtol=0.01, atol=1e-30)


def test_eight_bits() -> None:
    x = RNG.normal(size=(20, 96)).astype(np.float32)
    codes, scale = stored(x, 8)
    back = (codes.astype(np.float64) - 128) * np.repeat(scale.astype(np.float64), 32, 1)
    most = np.repeat(np.abs(x).reshape(20, 3, 32).max(2), 32, 1)
    assert (np.abs(back - x) <= most * (0.5 / 127 + 2**-8)).all()


def test_bytes() -> None:
    """At most 4.6 bits an element of a kernel; a table has 8."""
    for columns in (576, 2048, 8192):
        kernel, table = (
            Storage((512, columns), "bfloat16", own(4, is_table)) for is_table in (False, True)
        )
        assert kernel.nbytes * 8 <= 4.6 * 512 * columns
        assert table.nbytes * 8 <= 8.5 * 512 * columns
