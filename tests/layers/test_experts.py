"""Experts compute the tokens that chose them, and no others."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.layers.experts import add_expert

HIDDEN, TOP = 3, 2


def block(matrix: jax.Array, x: jax.Array) -> jax.Array:
    return x @ matrix


@partial(jax.jit, static_argnums=0)
def added(size: int, matrix: jax.Array, x: jax.Array, *routed: jax.Array) -> jax.Array:
    return add_expert(partial(block, matrix), size, (x,), *routed)


@given(
    tokens=st.sampled_from([1, 2, 4, 7]),
    size=st.sampled_from([1, 2, 4, 16]),
    choosing=st.sets(st.integers(0, 6)),
    seed=st.integers(0, 9),
)
def test_an_expert_adds_its_share_of_the_tokens_that_chose_it(
    tokens: int, size: int, choosing: set[int], seed: int
) -> None:
    """One, none, some or all of them; in steps of any size."""
    rng = np.random.default_rng(seed)
    x, out = rng.standard_normal((2, tokens, HIDDEN)).astype(np.float32)
    matrix = rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32)
    share = rng.random((tokens, TOP)).astype(np.float32)
    experts = np.tile(np.array([3, 5], np.int32), (tokens, 1))
    mine = sorted(token for token in choosing if token < tokens)
    experts[mine, seed % TOP] = 8
    expected = out.copy()
    expected[mine] += (x[mine] @ matrix) * share[mine, seed % TOP][:, None]
    number = np.int32(8)
    found = added(size, matrix, x, experts, share, number, out)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (4, 4), (4, 2), (9, 16)])
def test_an_unchosen_expert_is_not_computed(tokens: int, size: int) -> None:
    """XLA must not move its products out of their loop; padding has the number -1."""
    calls = []

    def counted(x: np.ndarray) -> np.ndarray:
        calls.append(x.shape)
        return x

    def counting(x: jax.Array) -> jax.Array:
        return jax.pure_callback(counted, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    arrays = (
        (np.ones((tokens, HIDDEN), np.float32),),
        np.zeros((tokens, TOP), np.int32),
        np.ones((tokens, TOP), np.float32),
    )
    out = np.ones((tokens, HIDDEN), np.float32)
    run = jax.jit(partial(add_expert, counting, size))
    np.testing.assert_array_equal(run(*arrays, np.int32(-1), out), out)
    assert not calls
    run(*arrays, np.int32(0), out).block_until_ready()
    assert calls
