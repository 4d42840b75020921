"""Tests products in tiles inside XLA's programs on the CPU, against NumPy."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_jax.cpu import matmul, processor
from flexgen_jax.cpu.jit.emit import F32, I16, Function, Value
from flexgen_jax.cpu.jit.few_rows import MOST
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel
from flexgen_jax.cpu.jit.many_rows import COLUMNS, DEPTH
from flexgen_jax.cpu.jit.operands import PAIR, Operands
from flexgen_jax.cpu.jit.paper_rows import FOLDED, max_folded_rows
from flexgen_jax.cpu.jit.tiles import give_rows
from flexgen_jax.cpu.processor import FOR_FLOATS, FOR_INTEGERS, FOR_PAIRS
from flexgen_jax.layers import programs
from flexgen_jax.layers.quantization import QuantizedArray, dequantize, quantize, quantize_as
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.families import read_config
from flexgen_jax.models.formats.storage import GROUP_SIZE
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from tests.helpers.arrays import anew, levels, numbers
from tests.helpers.cases import covering
from tests.helpers.kernels import CPU, XLA, XLA_ON_CPU
from tests.helpers.models import BASE
from tests.helpers.units import use_unit

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for the CPU as the device")
TARGET = "flexgen_jax_multiply_rows"
with_tiles = pytest.mark.usefixtures("tiles")


@pytest.mark.parametrize(
    ("unit", "rows", "columns", "is_tiled"),
    [
        ("avx512", 1, 1024, True),
        ("avx512", MOST, 1024, True),
        ("fma", 1, 1024, True),
        ("avx512", MOST + 1, 1024, False),  # small enough for XLA
        ("avx512", MOST + 1, 4096, True),
        ("avx512", MOST, 512, False),
        ("amx", MOST, 4096, False),
        ("amx", MOST + 1, 4096, True),
    ],
)
def test_what_is_faster_decides(
    unit: str, rows: int, columns: int, is_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "tile_unit", lambda kind="bf16": unit)
    x, kernel = (jnp.zeros((n, 1024), jnp.bfloat16) for n in (rows, columns))
    assert matmul._unit_for(x, kernel) == (unit if is_tiled else None)


@pytest.mark.parametrize(
    ("flags", "is_granted", "units"),
    [
        (FOR_PAIRS | FOR_INTEGERS | {"amx-tile", "amx-bf16", "amx-int8"}, True, ("amx", "avx512")),
        (FOR_PAIRS | FOR_FLOATS | {"amx-tile", "amx-bf16", "amx-int8"}, False, ("avx512", "fma")),
        (FOR_INTEGERS | FOR_FLOATS, True, ("fma",)),
        ({"amx-tile", "amx-bf16", "avx512f"}, True, ("amx",)),
        ({"avx2"}, True, ()),
        (set(), True, ()),
    ],
)
def test_units_are_those_that_may_be_used(
    flags: set[str], is_granted: bool, units: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (processor.WITHOUT, processor.EMULATED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor, "_host_features", lambda: dict.fromkeys(flags, True))
    monkeypatch.setattr(processor, "_may_use_amx", lambda: is_granted)
    this = processor.host.__wrapped__()
    assert this.units() == units
    assert ("amx" in this.units("int8")) == ("amx-int8" in flags and is_granted)
    assert ("avx512" in this.units("int8")) == (flags >= FOR_INTEGERS)
    assert ("avx2" in this.units("int8")) == ("avx2" in flags)
    monkeypatch.setenv(processor.WITHOUT, "avx512f")
    assert processor.host.__wrapped__().units() == tuple(x for x in units if x != "avx512")
    monkeypatch.setenv(processor.WITHOUT, "fma,amx-tile,avx512bf16")
    assert processor.host.__wrapped__().units() == ()


def test_units_of_another_processor_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.EMULATED, "avx512f,avx512bw,avx512bf16")
    this = processor.host.__wrapped__()
    assert "avx512" in this.units()


def exact(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> np.ndarray:
    """Returns x @ kernel.T + bias, in fp64."""
    left, right = (np.asarray(y, np.float64) for y in (x, kernel))
    out = left @ right.T
    return out if bias is None else out + np.asarray(bias, np.float64)


def assert_nearest(found: jax.Array, expected: np.ndarray) -> None:
    """Checks a result to half a unit of bfloat16's last place, plus the sums' own error."""
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8, atol=1e-3)


SHAPES = [
    (1, 32, 32),
    (2, 96, COLUMNS + 32),
    (3, 288, 64),
    (7, 4 * DEPTH + 64, 96),
    (MOST, 2 * DEPTH + 32, 160),
    (MOST + 1, 320, 96),
    (31, 64, 96),
    (32, 288, COLUMNS),
    (33, 320, COLUMNS + 64),
    (70, DEPTH, 3 * COLUMNS - 32),
    (70, 2 * DEPTH + 32, 64),
    (129, 2 * DEPTH + 320, 8 * COLUMNS + 32),
]
"""Rows, depth and columns."""


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize(("shape", "has_bias"), covering(SHAPES, [True, False], together=1))
def test_product_is_the_formula(shape: tuple[int, int, int], has_bias: bool) -> None:
    rows, depth, columns = shape
    x, kernel = numbers(rows, depth), numbers(columns, depth, seed=1)
    bias = numbers(columns, seed=2) if has_bias else None
    found = anew(CPU.matmul)(x, kernel, bias)
    assert_nearest(found, exact(x, kernel, bias))
    stacked = anew(CPU.matmul)(x.reshape(1, rows, depth), kernel, bias)
    np.testing.assert_array_equal(stacked[0], found)


PACKED_SHAPES = [
    (1, 32, 64),
    (1, 2 * FOLDED + 96, 192),
    (2, FOLDED + 32, 1088),
    (3, 96, 704),
    (9, FOLDED // 2 + 64, 320),
    (40, 128, 320),
    (33, 320, 8 * COLUMNS),
    (5, 4 * DEPTH + 64, 320),
    (MOST, 2 * DEPTH + 32, 320),
    (70, 2 * DEPTH + 32, COLUMNS + 64),
]


@pytest.mark.few(3)
@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize(("shape", "bits"), covering(PACKED_SHAPES, [8, 4], together=1))
def test_quantized_kernels_are_unpacked(shape: tuple[int, int, int], bits: int) -> None:
    rows, depth, columns = shape
    kernel = quantize(numbers(columns, depth, seed=1), bits, 64, 0)
    x, bias = numbers(rows, depth), numbers(columns, seed=2)
    target = f"{TARGET}_{bits}_{matmul.tile_unit()}"
    assert target in anew(CPU.matmul).lower(x, kernel, bias).as_text()
    found = anew(CPU.matmul)(x, kernel, bias)
    if rows > max_folded_rows(str(matmul.tile_unit()), processor.host()):
        assert_nearest(found, exact(x, dequantize(kernel), bias))
    else:
        assert_folded(found, x, kernel, bias)


def assert_folded(
    found: jax.Array, x: jax.Array, kernel: QuantizedArray, bias: jax.Array | None
) -> None:
    """Checks a product whose kernel weights were not unpacked: the numbers that its codes stand
    for, and where products are of bfloat16 half a unit of it for each of x times their scale."""
    expected, room = exact(x, jnp.asarray(levels(kernel)), bias), np.float64(1e-3)
    if matmul.tile_unit() != "fma":
        offsets = np.repeat(np.asarray(kernel.minimum, np.float64), GROUP_SIZE, 0)
        offsets += np.repeat(np.asarray(kernel.scale, np.float64), GROUP_SIZE, 0) * (
            1 << (kernel.storage.bits - 1)
        )
        steps = np.abs(levels(kernel) - offsets[: kernel.shape[0]])
        room = room + 2**-8 * np.abs(np.asarray(x, np.float64)) @ steps.T
    out = np.asarray(found, np.float64)
    assert (np.abs(out - expected) <= 2**-8 * np.abs(expected) + room).all()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_folding_loses_no_more_than_unpacking(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To round x times the scales costs about what it costs to round the weights."""
    use_unit("avx512", monkeypatch)
    monkeypatch.setattr(matmul, "FEW_PACKED", 0)
    kernel = quantize(numbers(1024, 2048, seed=1) / 16, 4, 64, 0)
    x = numbers(rows, 2048)
    right = exact(x, jnp.asarray(levels(kernel)), None)
    folded, unpacked = (
        np.asarray(program(x, kernel), np.float64) - right
        for program in (anew(CPU.logits), lambda x, kernel: exact(x, dequantize(kernel), None))
    )
    assert np.sqrt(np.mean(folded**2)) < 1.25 * np.sqrt(np.mean(unpacked**2))


@pytest.mark.few(1)
@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize(("bits", "columns"), [(8, 640), (4, 192), (2, 192), (2, 640)])
def test_unpacked_kernels_are_the_dequantized_ones(bits: int, columns: int) -> None:
    kernel = quantize(numbers(columns, 96, seed=3), bits, 64, 0)
    whole = kernel.storage.plane_length % PAIR == 0
    unit = jnp.eye(96, dtype=jnp.bfloat16)
    assert (TARGET in anew(CPU.matmul).lower(unit, kernel, None).as_text()) == whole
    for rows in (unit, unit[:MOST], unit[:5]):
        found = anew(CPU.matmul)(rows, kernel, None)
        if len(rows) > max_folded_rows(str(matmul.tile_unit()), processor.host()) or not whole:
            np.testing.assert_array_equal(found.T, dequantize(kernel)[:, : len(rows)])
        else:
            expected = levels(kernel).astype(np.float64)[:, : len(rows)]
            assert_nearest(found.T, expected)


@pytest.mark.few(1)
@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("rows", [5, 33])
def test_logits_are_not_rounded(rows: int, bits: int) -> None:
    x, table = numbers(rows, 320), numbers(COLUMNS + 64, 320, seed=1)
    kept = table if bits == 16 else quantize(table, bits, 64, 0)
    target = f"{TARGET}_{bits}_wide_{matmul.tile_unit()}"
    assert target in anew(CPU.logits).lower(x, kept).as_text()
    found = anew(CPU.logits)(x, kept)
    assert found.dtype == jnp.float32
    plain = table if bits == 16 else dequantize(kept)
    if bits < 16 and rows <= max_folded_rows(str(matmul.tile_unit()), processor.host()):
        assert_folded(found, x, kept, None)
    else:
        np.testing.assert_allclose(found, exact(x, plain, None), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize(("rows", "depth"), [(8, 64), (40, 64), (40, 2 * DEPTH + 32)])
def test_nan_and_infinity_show_in_their_rows(rows: int, depth: int) -> None:
    x, kernel = numbers(rows, depth), numbers(64, depth, seed=1)
    x = x.at[3, 5].set(jnp.nan).at[7, 0].set(jnp.inf)
    found = np.asarray(anew(CPU.matmul)(x, kernel, None).astype(jnp.float32))
    assert np.isnan(found[3]).all()
    assert np.isinf(found[7]).all()
    assert np.isfinite(np.delete(found, (3, 7), axis=0)).all()


@with_tiles
@given(st.lists(st.floats(width=32), min_size=1, max_size=PAIR), st.booleans())
@settings(deadline=None)
def test_results_are_rounded_to_the_nearest(values: list[float], is_aligned: bool) -> None:
    """Results are rounded as ml_dtypes does: ties to even, NaN stays NaN."""
    sums = np.zeros((2, 2, 16, 16), np.float32)
    row = np.zeros(PAIR, np.float32)
    row[: len(values)] = values
    sums[0, :, 0] = row.reshape(2, 16)
    room = np.zeros(3 * PAIR, np.uint16)
    start = (64 - room.ctypes.data % 64) % 64 // 2
    out = room[start : start + PAIR] if is_aligned else room[start + 1 : start + 1 + PAIR]
    giving_kernel().bind(sums, np.zeros(PAIR, np.float32), out, int(is_aligned))(0, 1)
    found, expected = out.view(ml_dtypes.bfloat16), (row + np.float32(0)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@cache
def giving_kernel() -> HostKernel:
    def emit(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
        zero, columns = k.index(0), k.index(PAIR)
        out, bias, sums = call.array(2, I16), call.array(1, F32), call.array(0, F32)
        operands = Operands(out, bias, out, k.index(1), zero, columns)
        give_rows(operands, sums, (zero, zero), (k.index(1), 1), call.index(3).differs(0))

    return HostKernel("test_of_giving", emit)


@with_tiles
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("depth", "columns", "dtypes"),
    [
        (64, 60, ("bfloat16", "bfloat16")),
        (60, 64, ("bfloat16", "bfloat16")),
        (64, 64, ("float32", "float32")),
        (64, 64, ("bfloat16", "float32")),
    ],
)
def test_what_tiles_do_not_fit_is_left_to_xla(
    depth: int, columns: int, dtypes: tuple[str, str]
) -> None:
    x, kernel = (
        numbers(n, depth, seed=n).astype(dtype)
        for n, dtype in zip((40, columns), dtypes, strict=True)
    )
    program = anew(CPU.matmul).lower(x, kernel, None)
    assert TARGET not in program.as_text()
    np.testing.assert_array_equal(CPU.matmul(x, kernel, None), XLA_ON_CPU.matmul(x, kernel, None))


@with_tiles
@pytest.mark.usefixtures("always")
def test_processors_without_a_unit_leave_it_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "tile_unit", lambda: None)
    program = anew(CPU.matmul).lower(numbers(44, 64), numbers(64, 64), None)
    assert TARGET not in program.as_text()


@pytest.mark.few(1)
@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("bits", [16, 4])
def test_a_layer_is_that_of_xla(bits: int) -> None:
    config = read_config(BASE)
    formats = Formats("bfloat16", bits, weight_format="paper")
    hidden, first = numbers(6, 20, config.hidden_size), np.arange(6, dtype=np.int32)
    weights = {}
    for seed, tensor in enumerate(model_spec(config).decoders[0].tensors):
        plain, storage = numbers(*tensor.shape, seed=seed) / 4, formats.weight(tensor)
        weights[tensor.path] = plain if storage.bits == 16 else quantize_as(plain, storage)
    outs = []
    for kernels in (CPU, XLA):
        program = programs.Programs(config, formats, kernels).get(
            programs.prefill, layer=model_spec(config).decoders[0], rows=6, cuts=(20,)
        )
        assert (TARGET in program.as_text()) == (kernels is CPU)
        found = program(weights, hidden, np.zeros(2, np.int32), Rows.of(first, 20))
        outs.append([np.asarray(x, np.float32) for x in jax.tree.leaves(found)])
    for ours, theirs in zip(*outs, strict=True):
        valid = np.ones(ours.shape, bool)
        if ours.ndim == 3:
            valid[:] = (np.arange(20) >= first[:, None])[..., None]
        np.testing.assert_allclose(ours[valid], theirs[valid], rtol=0.02, atol=0.05)
