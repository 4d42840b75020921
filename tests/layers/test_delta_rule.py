"""The gated delta rule in chunks and token by token, against the formula in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.layers import delta_rule
from tests.helpers.cases import examples
from tests.helpers.delta import by_formula, made


@examples(3)
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([1, 2, 17, 64]),
    filling=st.sampled_from([0, 3]),
    group=st.integers(1, 3),
    alike=st.booleans(),
)
def test_chunks_are_the_formula(
    seed: int, tokens: int, filling: int, group: int, alike: bool
) -> None:
    """Two chunks, one after the other; what fills them changes nothing. With 8 elements for 64 keys
    the triangular system costs three digits of fp32."""
    given, before = made(seed, 2, 2 * tokens, 2, group, alike)
    wanted, left = by_formula(given, before)
    query, key, value, log_fade, write = (jnp.asarray(each, jnp.float32) for each in given)
    state, results = jnp.asarray(before, jnp.float32), []
    for start in (0, tokens):
        part = slice(start, start + tokens)
        sides = [query[:, part], key[:, part], value[:, part], log_fade[:, part]]
        empty = [jnp.pad(x, [(0, 0), (0, filling)] + [(0, 0)] * (x.ndim - 2)) for x in sides]
        shares = jnp.pad(write[:, part], [(0, 0), (0, filling), (0, 0), (0, 0)])
        padded = delta_rule.Sides(*empty, write=shares + 0.5 * (shares == 0))
        out, state = delta_rule.chunk(padded, state)
        results.append(out[:, :tokens])
    np.testing.assert_allclose(jnp.concatenate(results, 1), wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(state, left, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("group", [1, 3])
def test_steps_are_the_formula(group: int) -> None:
    given, before = made(5, 3, 9, 2, group, alike=False)
    wanted, left = by_formula(given, before)
    state = jnp.asarray(before, jnp.float32)
    for token in range(9):
        sides = delta_rule.Sides(*(jnp.asarray(each[:, token], jnp.float32) for each in given))
        out, state = delta_rule.step(sides, state)
        np.testing.assert_allclose(out, wanted[:, token], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, left, rtol=1e-4, atol=1e-5)
