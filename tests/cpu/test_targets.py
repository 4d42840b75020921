"""Generated code is called by an interface of XLA's; where that does not work, XLA computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax.cpu import attention, matmul, targets
from flexgen_jax.cpu.targets import INTERFACE, NEWEST, KernelWarning, interface_version, register
from flexgen_jax.models.parts import AttentionSpec
from tests.helpers.arrays import anew, numbers
from tests.helpers.kernels import CPU, XLA_ON_CPU

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for the CPU as the device")


def test_the_interface_is_the_one_that_handlers_know() -> None:
    found = interface_version()
    assert found is not None, "jaxlib has no xla/ffi/api/c_api.h: its version cannot be checked"
    assert INTERFACE <= found <= NEWEST, (
        f"XLA's foreign-function interface is {found}, and was last looked at in {NEWEST}: compare "
        "the structures in xla/ffi/api/c_api.h with the words that cpu/jit/handler.py reads; then "
        "set NEWEST in cpu/targets.py. Until then XLA computes."
    )


@pytest.fixture
def anew_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small caches and products are for the kernels too, and none is registered yet."""
    monkeypatch.setattr(attention, "MIN_KERNEL_ELEMENTS", 0)
    monkeypatch.setattr(attention, "FEW_OF_A_PROMPT", 0)
    for name in ("FEW_PRODUCTS", "FEW_ROWS", "FEW_READ", "FEW_PACKED"):
        monkeypatch.setattr(matmul, name, 0)
    known = (attention._target, attention._prompt_target, matmul._target, matmul._int8_target)
    for cache in known:
        cache.cache_clear()
    yield
    for cache in known:
        cache.cache_clear()


def broken(*_: Any) -> Any:
    raise RuntimeError("no such compiler")


@pytest.mark.usefixtures("anew_registered")
@pytest.mark.filterwarnings("always::flexgen_jax.cpu.targets.KernelWarning")
@pytest.mark.parametrize("cause", ["interface", "code"])
def test_what_cannot_be_called_is_left_to_xla(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are those of XLA, to the bit, and a warning says why it is slower."""
    if cause == "interface":
        monkeypatch.setattr(targets, "interface_version", lambda: (0, NEWEST[1] + 1))
    else:
        for name in ("attention_handler", "prompt_handler"):
            monkeypatch.setattr(attention, name, broken)
        for name in ("product_handler", "int8_handler"):
            monkeypatch.setattr(matmul, name, broken)
    x, kernel = numbers(96, 128), numbers(64, 128, seed=1)
    query = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 1, 64)), jnp.float32)
    block = (jnp.ones((2, 3, 8, 64)), jnp.ones((2, 3, 8, 64)))
    where = (jnp.zeros(1, jnp.int32), jnp.int32(8), jnp.zeros(2, jnp.int32))
    prompt = [numbers(2, 16, 64, seed=seed).reshape(2, 16, 1, 64) for seed in range(3)]
    with pytest.warns(KernelWarning, match="own kernels cannot be used"):
        found = anew(partial(CPU.decode_attention, spec=AttentionSpec(3, 3, 64)))(
            query, (block,), *where
        )
    expected = anew(partial(XLA_ON_CPU.decode_attention, spec=AttentionSpec(3, 3, 64)))(
        query, (block,), *where
    )
    np.testing.assert_array_equal(found[0], expected[0])
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("matmul", (x, kernel, None)),
        ("logits", (x, kernel)),
    ]
    for name, args in cases:
        ours, theirs = (anew(getattr(kernels, name))(*args) for kernels in (CPU, XLA_ON_CPU))
        np.testing.assert_array_equal(ours, theirs)
    first = jnp.zeros(2, jnp.int32)
    both = [
        jax.jit(lambda *a, k=kernels: k.prefill_attention(*a, spec=AttentionSpec(1, 1, 64)))(
            *prompt, first
        )[0]
        for kernels in (CPU, XLA_ON_CPU)
    ]
    np.testing.assert_array_equal(*both)


def test_no_memory_is_not_taken_for_a_missing_compiler() -> None:
    def make() -> int:
        raise MemoryError

    with pytest.raises(MemoryError):
        register("test_of_no_memory", make)
