"""The CPU's kernel for a token of the gated delta rule, against the formula in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax.cpu import delta
from flexgen_jax.layers.delta_rule import Sides
from tests.helpers.delta import by_formula, made

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for the CPU as the device")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the kernel compute small states, too."""
    monkeypatch.setattr(delta, "MIN_KERNEL_ELEMENTS", 0)


@pytest.mark.parametrize("donates", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "values"), [(1, 1, 1, 6), (3, 2, 1, 76), (2, 2, 3, 128)]
)
def test_tokens_are_the_formula(
    batch: int, heads: int, group: int, values: int, donates: bool
) -> None:
    """One after the other, in the memory of the state before where that is donated."""
    given, before = made(5, batch, 6, heads, group, alike=False, values=values)
    wanted, left = by_formula(given, before)
    state = jnp.asarray(before, jnp.float32)
    step = jax.jit(delta.delta_step, donate_argnums=(1,) if donates else ())
    for token in range(6):
        sides = Sides(*(jnp.asarray(each[:, token], jnp.float32) for each in given))
        kept = state
        made_of = step(sides, state)
        assert made_of is not None, "the kernel can be called"
        out, state = made_of
        assert kept.is_deleted() == donates
        np.testing.assert_allclose(out, wanted[:, token], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, left, rtol=1e-4, atol=1e-5)
