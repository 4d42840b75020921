"""Tests attention inside XLA's programs on the CPU, against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax import Policy
from flexgen_jax.cpu import attention
from flexgen_jax.cpu.jit import handler
from flexgen_jax.cpu.jit.emit import I32, Function
from flexgen_jax.cpu.jit.handler import RANGES_PER_THREAD, Call, compiled_handler
from flexgen_jax.cpu.targets import register
from flexgen_jax.layers.attention import attend_blocks
from flexgen_jax.layers.programs import table
from tests.helpers.attention import (
    FORMATS,
    LENGTHS,
    POSITION,
    SPECS,
    numpy_attention,
    random_blocks,
)
from tests.helpers.cases import covering
from tests.helpers.kernels import CPU, XLA
from tests.helpers.models import SHORT, run_greedy

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for the CPU as the device")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the compute kernels attend to the caches and prompts of small models too."""
    monkeypatch.setattr(attention, "MIN_KERNEL_ELEMENTS", 0)
    monkeypatch.setattr(attention, "FEW_OF_A_PROMPT", 0)
    table.compiled.cache_clear()
    yield
    table.compiled.cache_clear()


def random_cache(seed: int, dtype: str, bits: int, head_dim: int, batch: int = 4) -> Any:
    """Returns KV blocks, the last one plain as a tail is, and the numbers that their keys and
    values stand for."""
    blocks, stands_for = random_blocks(seed, dtype, bits, 16, head_dim, batch)
    return tuple(blocks), stands_for


PLAIN = SPECS["plain"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "head_dim", "variant"), covering(FORMATS, [20, 64, 128], list(SPECS), together=1)
)
def test_attention_is_the_formula(kind: tuple[str, int], head_dim: int, variant: str) -> None:
    """Left padding reaches into the second block; one sequence has a single token."""
    dtype, bits = kind
    blocks, (key, value) = random_cache(head_dim, dtype, bits, head_dim)
    rng = np.random.default_rng(0)
    spec = SPECS[variant]
    drawn = rng.normal(size=(4, spec.num_heads, 1, head_dim)) * head_dim**-0.5
    query = jnp.asarray(drawn, dtype)
    first = np.array([0, 3, 9, POSITION - 1], np.int32)
    starts = np.array([0, 7, 12], np.int32)
    where = (starts, np.int32(POSITION), first)
    at = np.arange(sum(LENGTHS))
    valid = (at[None] >= first[:, None]) & (at[None] < POSITION)
    asked = np.asarray(query, np.float32)
    expected, expected_lse = numpy_attention(asked, key, value, valid, spec.softcap)
    for kernels in (CPU, XLA):
        out, lse = jax.jit(partial(kernels.decode_attention, spec=spec))(query, blocks, *where)
        # XLA's code rounds what it unpacks, which serves many heads, too.
        unpacks = kernels is XLA or variant == "many heads"
        close = 2e-2 if unpacks and bits < 16 and dtype != "float32" else 1e-5
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2 * close)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=close)


def test_a_row_without_valid_tokens_weighs_nothing() -> None:
    blocks, _ = random_cache(0, "float32", 16, 8)
    query = jnp.ones((4, 3, 1, 8))
    first = np.array([0, POSITION, POSITION, 0], np.int32)
    starts = np.array([0, 7, 12], np.int32)
    args = (query, blocks, starts, np.int32(POSITION), first)
    out, lse = jax.jit(partial(CPU.decode_attention, spec=PLAIN))(*args)
    expected, expected_lse = attend_blocks(*args)
    np.testing.assert_allclose(out[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[1:3], 0)
    assert (np.asarray(lse)[1:3] < -1e29).all()
    np.testing.assert_allclose(lse[3], expected_lse[3], rtol=1e-6)


def test_nan_shows() -> None:
    blocks, _ = random_cache(0, "float32", 16, 8)
    key, value = blocks[0]
    blocks = ((key.at[1, 2, 3].set(jnp.nan), value), *blocks[1:])
    args = (np.array([0, 7, 12], np.int32), np.int32(POSITION), np.zeros(4, np.int32))
    out, _ = jax.jit(partial(CPU.decode_attention, spec=PLAIN))(
        jnp.ones((4, 3, 1, 8)), blocks, *args
    )
    assert np.isnan(out[1, 2]).all()
    assert np.isfinite(out[0]).all()


def test_calls_from_many_threads_at_once() -> None:
    """More calls at a time than XLA has threads: each ends, with the result that it gives alone."""
    program = jax.jit(partial(CPU.decode_attention, spec=PLAIN))
    where = (np.array([0, 7, 12], np.int32), np.int32(POSITION), np.zeros(4, np.int32))
    query = jnp.ones((4, 3, 1, 64), jnp.bfloat16)
    caches = [random_cache(seed, "bfloat16", 4, 64)[0] for seed in range(8)]
    alone = [np.asarray(program(query, cache, *where)[0]) for cache in caches]

    def many(index: int) -> bool:
        found = [program(query, caches[index], *where)[0] for _ in range(200)]
        return all(np.array_equal(x, alone[index]) for x in found)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(8)))


@pytest.mark.parametrize("bits", [pytest.param(16, marks=pytest.mark.slow), 4])
def test_runs_are_those_of_attention_on_the_host(
    checkpoint: Callable[[], Path], tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are equal with the cache in RAM, on disk, and attended to by the host."""
    real, found, calls, called = attention._target, [], [], set[tuple[Any, ...]]()
    monkeypatch.setattr(attention, "_target", lambda *key: called.add(key) or real(*key))
    for device, host, place in ((100, 0, "auto"), (0, 0, "auto"), (0, 100, "host")):
        policy = Policy.from_percent(
            *(100, 0, device, host, 100, 0),
            **{"batch_size": 2, "num_batches": 2, "kv_block_tokens": 8, "cache_bits": bits},
            attention=place,
        )
        found.append(run_greedy(checkpoint(), SHORT, policy, offload_dir=tmp_path))
        calls.append({*called})
    assert found[0] == found[1] == found[2]
    assert calls[0] == {(8, "float32", 16), (8, "float32", bits)}


def test_a_part_without_memory_is_an_error() -> None:
    """The call neither gives a wrong result nor hangs."""

    def compute(k: Function, call: Call) -> None:
        amount = call.part.equals(1).select(k.index(1 << 60), 16)
        with k.workspace((I32, amount)):
            pass

    name = "test_of_failing"
    target = register(name, lambda: compiled_handler(name, compute))
    program = jax.jit(jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((4, 1), jnp.float32)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED.*no memory"):
        jax.block_until_ready(program(jnp.zeros(4)))


def test_no_more_threads_than_cores_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(k: Function, call: Call) -> None:
        call.result(0).array(I32).store(call.part, call.parts.to(I32))

    name = "test_of_sharing"
    monkeypatch.setattr(handler, "core_count", lambda: 1)
    target = register(name, lambda: compiled_handler(name, compute))
    program = jax.jit(jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((64,), jnp.int32)))
    assert program(jnp.zeros(4))[0] == RANGES_PER_THREAD


def test_the_smallest_numbers_of_half_precision_are_not_zero() -> None:
    """float16's subnormal numbers pass through subnormal fp32 numbers, which XLA's threads flush to
    zero."""
    small = np.float16(3e-5)
    blocks, _ = random_cache(0, "float16", 16, 20)
    blocks = tuple((key, jnp.asarray(np.full(value.shape, -small))) for key, value in blocks)
    where = (np.array([0, 7, 12], np.int32), np.int32(POSITION), np.zeros(4, np.int32))
    out, _ = jax.jit(partial(CPU.decode_attention, spec=PLAIN))(
        jnp.ones((4, 3, 1, 20), jnp.float16), blocks, *where
    )
    np.testing.assert_allclose(out, np.full(out.shape, -np.float32(small)), rtol=1e-4)
