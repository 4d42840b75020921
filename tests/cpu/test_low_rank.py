"""LoRA adapters for few rows, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax.cpu.low_rank import add_low_rank

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for the CPU as the device")


def bfloat16(generator: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(generator.standard_normal(shape), jnp.bfloat16)


@pytest.mark.parametrize(
    ("batch", "tokens", "depth", "columns", "rank", "count"),
    [
        (1, 1, 64, 64, 16, 1),
        (2, 3, 80, 208, 5, 3),
        (16, 1, 16, 16, 1, 2),
        (3, 5, 2048, 48, 8, 4),
        (7, 2, 144, 1024, 64, 1),
    ],
)
@pytest.mark.parametrize("chooses", [False, True])
def test_the_result_is_that_of_the_formula(
    batch: int, tokens: int, depth: int, columns: int, rank: int, count: int, chooses: bool
) -> None:
    generator = np.random.default_rng(batch)
    out, x = bfloat16(generator, batch, tokens, columns), bfloat16(generator, batch, tokens, depth)
    a, b = bfloat16(generator, count, rank, depth), bfloat16(generator, count, rank, columns)
    adapters = generator.integers(-1, count, batch).astype("i4") if chooses else None
    found = jax.jit(add_low_rank)(out, x, a, b, adapters)
    assert found is not None, "the kernel can be called"
    wide = [np.asarray(array, np.float64) for array in (out, x, a, b)]
    expected = wide[0].copy()
    for row in range(batch):
        number = 0 if adapters is None else adapters[row]
        if number >= 0:
            expected[row] += wide[1][row] @ wide[2][number].T @ wide[3][number]
    rounded = 2.0**-8 * np.abs(expected) + 1e-4 * np.abs(expected).max()
    assert (np.abs(np.asarray(found, np.float64) - expected) <= rounded).all()
