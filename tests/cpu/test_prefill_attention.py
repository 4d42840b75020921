"""Tests a prompt's attention inside XLA's programs on the CPU, and its vector code, against
NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import Policy, SamplingParams
from flexgen_jax.cpu import CpuKernels, attention
from flexgen_jax.cpu.jit.emit import F32, Function, Value
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel
from flexgen_jax.cpu.jit.prefill_attention import COLUMNS, ROWS, Matrix, emit_product
from flexgen_jax.cpu.jit.softmax import weigh
from flexgen_jax.engine import starting
from flexgen_jax.layers.attention import MASKED
from flexgen_jax.layers.programs import table
from flexgen_jax.models.parts import AttentionSpec
from flexgen_jax.offload import device
from flexgen_jax.policy.hardware import KernelSizes
from tests.helpers.cases import examples
from tests.helpers.kernels import CPU, XLA
from tests.helpers.models import run_greedy

HEADS = 3
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for the CPU as the device")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the compute kernels attend to small prompts too."""
    monkeypatch.setattr(attention, "FEW_OF_A_PROMPT", 0)


SPECS = {
    "plain": AttentionSpec(HEADS, HEADS, 1),
    "groups": AttentionSpec(2 * HEADS, HEADS, 1),
    "one KV head": AttentionSpec(HEADS, 1, 1),
    "window": AttentionSpec(HEADS, HEADS, 1, window=7),
    "softcap": AttentionSpec(HEADS, HEADS, 1, softcap=2.0),
    "all": AttentionSpec(2 * HEADS, HEADS, 1, window=20, softcap=5.0),
}
"""Variants of attention, but for the elements of a head."""


def sides(spec: AttentionSpec, batch: int, tokens: int, size: int, dtype: str) -> list[jax.Array]:
    """Returns a query (scaled), a key and a value, each [batch, token, head, head_dim]."""
    rng = np.random.default_rng(tokens)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    found = [rng.normal(size=(batch, tokens, count, size)) for count in heads]
    return [jnp.asarray(x * y, dtype) for x, y in zip(found, (size**-0.5, 3, 1), strict=True)]


def wide(x: jax.Array) -> np.ndarray:
    """Swaps heads and tokens, and returns fp64."""
    return np.asarray(x, np.float64).swapaxes(1, 2)


def formula(
    spec: AttentionSpec, sides: list[np.ndarray], seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a sequence's attention and the log-sum-exp of its scores, fp64.

    sides: query, key and value, each [head, token, head_dim]; seen: bool [query, key].
    """
    query, key, value = sides
    group = len(query) // len(key)
    key, value = np.repeat(key, group, 0), np.repeat(value, group, 0)
    scores = query @ key.swapaxes(1, 2)
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    weights = np.exp(np.where(seen, scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total, total, 1) @ value, np.log(np.where(total, total, 1))[..., 0]


@pytest.mark.few(2)
@on_cpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("kind", "dtype", "tokens", "head_dim"),
    [
        *(("plain", "float32", tokens, 20) for tokens in (1, 13, 32, 70)),
        *(("plain", "bfloat16", 45, size) for size in (8, 128)),
        ("plain", "float16", 45, 64),
        *((kind, "float32", 70, 20) for kind in SPECS if kind != "plain"),
    ],
)
def test_attention_is_the_formula(kind: str, dtype: str, tokens: int, head_dim: int) -> None:
    """The padding is none, some, and all but one of the tokens."""
    spec = SPECS[kind]
    query, key, value = sides(spec, 4, tokens, head_dim, dtype)
    first = np.array([0, tokens // 3, tokens // 2, tokens - 1], np.int32)
    at = np.arange(tokens)
    close = 1e-4 if dtype == "float32" else 1e-2
    for kernels in (CPU, XLA):
        attend = jax.jit(partial(kernels.prefill_attention, spec=spec))
        out, (keys, values) = attend(query, key, value, first)
        for row, start in enumerate(first):
            seen = (at[:, None] >= at) & (at >= start)
            seen &= at > at[:, None] - (spec.window or tokens)
            expected, _ = formula(spec, [wide(x)[row] for x in (query, key, value)], seen)
            found = wide(out)[row]
            np.testing.assert_allclose(found[:, start:], expected[:, start:], close, close)
            assert kernels is XLA or (found[:, :start] == 0).all()
        np.testing.assert_array_equal(np.asarray(keys, np.float32), wide(key))
        np.testing.assert_array_equal(np.asarray(values, np.float32), wide(value))


@pytest.mark.few(1)
@on_cpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("lead", [0, 27, 40, 55])
@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [
        ("plain", "float32", 20),
        ("plain", "bfloat16", 64),
        ("groups", "float16", 8),
        ("one KV head", "float32", 8),
        ("all", "float32", 8),
    ],
)
def test_attention_to_a_block_is_the_formula(kind: str, dtype: str, size: int, lead: int) -> None:
    """With padding that is none, some and all of the block, in generated code and in XLA's; from
    within the block, and from after it."""
    spec, tokens, asked, rng = SPECS[kind], 40, 13, np.random.default_rng(lead)
    shapes = [(spec.num_heads, asked), (spec.num_kv_heads, tokens), (spec.num_kv_heads, tokens)]
    arrays = [jnp.asarray(rng.normal(size=(3, *shape, size)).astype(dtype)) for shape in shapes]
    first = np.array([0, 9, tokens], np.int32)
    each = [np.asarray(x, np.float64) for x in arrays]
    at, last = np.arange(tokens), lead + np.arange(asked)
    for kernels in (CPU, XLA):
        attend = jax.jit(partial(kernels.chunk_attention, spec=spec))
        out, lse = attend(*arrays, first, np.int32(lead))
        assert np.isfinite(out).all()
        assert (np.asarray(lse)[2] < -1e29).all(), "a block of padding does not count"
        for row, start in enumerate(first[:2]):
            seen = (at >= start) & (at <= last[:, None])
            seen &= at > last[:, None] - (spec.window or 1000)
            some = seen.any(-1)  # the others are padding, or see only later blocks
            expected, total = formula(spec, [x[row] for x in each], seen)
            close = 1e-4 if dtype == "float32" else 1e-2
            np.testing.assert_allclose(out[row][:, some], expected[:, some], close, close)
            np.testing.assert_allclose(lse[row][:, some], total[:, some], 1e-4, 1e-4)
            assert (np.asarray(lse)[row][:, ~some] < -1e29).all()


@on_cpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("side", range(3))
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_what_is_not_finite_shows(side: int, special: float) -> None:
    spec = SPECS["plain"]
    arrays = sides(spec, 2, 13, 8, "float16")
    arrays[side] = arrays[side].at[1, 5, 1, 1].set(special)
    attend = jax.jit(partial(CPU.prefill_attention, spec=spec))
    out, _ = attend(*arrays, np.zeros(2, np.int32))
    assert not np.isfinite(wide(out)[1, 1]).all()
    assert np.isfinite(wide(out)[0]).all()


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("weight_bits", [16, pytest.param(4, marks=pytest.mark.slow)])
def test_runs_are_those_of_xla(
    checkpoint: Callable[[], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_bits: int,
) -> None:
    """The tokens are equal also where a batch goes through a layer in groups, the last one
    smaller."""
    sizes = KernelSizes(prefill_rows=16, packed_prefill_rows=16)
    for module in (starting, device):
        monkeypatch.setattr(module, "kernels_of_device", lambda: CpuKernels(sizes))
    policy = Policy.from_percent(
        *(0, 100, 0, 100, 0, 100), batch_size=5, num_batches=1, weight_bits=weight_bits
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    real, found, calls, called = attention._prompt_target, [], [], set[tuple[object, ...]]()
    monkeypatch.setattr(attention, "_prompt_target", lambda *key: called.add(key) or real(*key))
    for few in (1 << 18, 0):
        monkeypatch.setattr(attention, "FEW_OF_A_PROMPT", few)
        table.compiled.cache_clear()
        found.append(run_greedy(checkpoint(), params, policy, offload_dir=tmp_path))
        calls.append({*called})
    assert found[0] == found[1]
    assert calls == [set(), {(8, "float32")}]
    table.compiled.cache_clear()


@cache
def softmax_kernel() -> HostKernel:
    def emit(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
        tokens = call.index(1), call.index(2)
        result = weigh(k, call.array(0, F32), tokens, call.index(3), call.single(4))
        for number, value in enumerate(result):
            call.array(5, F32).store(number, value)

    return HostKernel("test_of_softmax", emit)


@examples(30)
@given(
    data=st.data(),
    room=st.sampled_from([16, 32, 80]),
    at=st.integers(0, 5),
    scale=st.sampled_from([0.0, 1.0, 300.0]),
)
def test_weights_are_the_formula(data: st.DataObject, room: int, at: int, scale: float) -> None:
    end = data.draw(st.integers(1, room))
    begin = data.draw(st.integers(0, end - 1))
    rng = np.random.default_rng(end)
    scores = (rng.normal(size=at + room + 3) * scale).astype(np.float32)
    scores[:at] = scores[at + end :] = 7e4  # must not be read
    before, asked = scores.copy(), scores[at + begin : at + end].copy()
    peak = data.draw(st.sampled_from([np.float32(MASKED), np.float32(1.5)]))
    result = np.empty(2, np.float32)
    softmax_kernel().bind(scores[at:], begin, end, room, peak, result)(0, 1)
    assert result[0] == max(peak, asked.max())
    expected = np.zeros(room)
    expected[begin:end] = np.exp((asked - result[0]).astype(np.float64))
    np.testing.assert_allclose(scores[at : at + room], expected, rtol=1e-6, atol=2e-38)
    np.testing.assert_allclose(result[1], expected.sum(), rtol=1e-6, atol=1e-36)
    np.testing.assert_array_equal(scores[:at], before[:at])
    np.testing.assert_array_equal(scores[at + room :], before[at + room :])


@pytest.mark.parametrize("count", [0, 1, 20])
def test_product_of_a_tile(count: int) -> None:
    def emit(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
        left, right, out = (call.array(n, F32) for n in range(3))
        sides = Matrix(left, 20), Matrix(right.at(36), 100), Matrix(out.at(40), 90)
        emit_product(*sides, call.index(3))

    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=shape).astype(np.float32) for shape in ((ROWS, 20), (20, 100)))
    out = np.zeros((ROWS, 90), np.float32)
    HostKernel("test_of_product", emit).bind(left, right, out, count)(0, 1)
    expected = np.zeros_like(out)
    expected[:, 40 : 40 + COLUMNS] = left[:, :count] @ right[:count, 36 : 36 + COLUMNS]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
