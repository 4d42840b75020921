"""Emitted functions: instructions and their formulas, object files on disk, other processors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from flexgen_jax.cpu import processor
from flexgen_jax.cpu.grouped import grouping_of
from flexgen_jax.cpu.jit import (
    decode_attention,
    delta_step,
    handler,
    host_kernel,
    instructions,
    machine_code,
    prefill_attention,
    product_handlers,
)
from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, I64, Function, Scalar, Value
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel
from flexgen_jax.cpu.processor import Processor
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.lanes import in_lanes
from flexgen_jax.models.formats.storage import Storage
from tests.helpers.cases import examples

AVX2 = frozenset({"avx2", "fma", "f16c"})
WIDE = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
PAIRS = WIDE | {"avx512bf16", "avx512vnni"}
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def known(name: str, features: frozenset[str], triple: str = X86) -> Processor:
    return Processor(name, features, features, triple=triple)


SAPPHIRE_RAPIDS = known("sapphirerapids", PAIRS | {"amx-tile", "amx-bf16", "amx-int8"})
ZEN4, SKYLAKE, HASWELL = (
    known(name, features)
    for name, features in (("znver4", PAIRS), ("skylake-avx512", WIDE), ("haswell", AVX2))
)
NEOVERSE = known("neoverse-n1", frozenset({"neon"}), ARM)
OWN4 = grouping_of(in_lanes(Storage((2048, 2048), "bfloat16", own(4))))


class CapturedError(Exception):
    """Ends the compiling of a handler when its module is there."""


def module_of(compile_handler: Callable[[], int], of: Processor) -> ir.Module:
    """Returns a handler's module for a processor."""
    modules: list[ir.Module] = []

    def capture(module: ir.Module) -> Any:
        modules.append(module)
        raise CapturedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CapturedError):
        patch.setattr(handler, "compiled", capture)
        patch.setattr(handler, "host", lambda: of)
        compile_handler()
    return modules[0]


def product(bits: int, unit: str) -> Callable[[], int]:
    return lambda: product_handlers.product_handler.__wrapped__("it", bits, False, unit)


def grouped(unit: str, rounding: Any) -> Callable[[], int]:
    make = product_handlers.grouped_handler.__wrapped__
    return lambda: make("it", OWN4, False, unit, rounding)


CASES = [
    (SAPPHIRE_RAPIDS, product(16, "amx"), {"tdpbf16ps", "tileloadd", "ldtilecfg"}),
    (
        SAPPHIRE_RAPIDS,
        lambda: product_handlers.int8_handler.__wrapped__("it", 4, "amx"),
        {"tdpbssd"},
    ),
    (ZEN4, product(4, "avx512"), {"vdpbf16ps", "vpermw"}),
    (ZEN4, lambda: product_handlers.int8_handler.__wrapped__("it", 16, "avx512"), {"vpdpbusd"}),
    (ZEN4, grouped("avx512", ""), {"vdpbf16ps", "vpdpbusd"}),
    (ZEN4, grouped("avx512", "fours"), {"vpdpbusd", "zmm"}),
    (SKYLAKE, product(16, "fma"), {"vfmadd", "zmm"}),
    (HASWELL, grouped("fma", "pairs"), {"vpmaddubsw", "vpmaddwd", "vfmadd"}),
    (HASWELL, product(8, "avx2"), {"vpmaddubsw"}),
    (NEOVERSE, grouped("fma", ""), {"fmla"}),
    (
        NEOVERSE,
        lambda: decode_attention.attention_handler.__wrapped__("it", 64, "float16", 4),
        {"fcvtl"},
    ),
    (
        NEOVERSE,
        lambda: prefill_attention.prompt_handler.__wrapped__("it", 64, "bfloat16"),
        {"fmla"},
    ),
    (HASWELL, lambda: delta_step.delta_handler.__wrapped__("it", 64, 64), {"vfmadd"}),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("of", "make", "needed"), CASES)
def test_other_processors_get_their_instructions(
    of: Processor, make: Callable[[], int], needed: set[str]
) -> None:
    """Handlers compile for processors that are not here. No address is relative to the code, since
    the linker may place constants more than 2 GiB away."""
    text = machine_code.assembly(module_of(make, of), of)
    assert "(%rip)" not in text
    assert {name for name in needed if name in text} == needed


def results_of(
    emit: Callable[..., Value], inputs: list[np.ndarray], out: np.ndarray, emulated: bool
) -> np.ndarray:
    """Returns what an instruction, or its formula, makes of vectors."""
    scalars: dict[str, Scalar] = {"float32": F32, "int8": I8, "uint8": I8, "int16": I16}
    scalars |= {"int32": I32, "uint16": I16}
    here = processor.host()
    of = Processor(here.name, here.features, frozenset() if emulated else here.native, here.options)

    def emit_all(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
        values = [
            call.array(n, scalars[str(x.dtype)]).load(0, x.size) for n, x in enumerate(inputs)
        ]
        call.array(len(inputs), scalars[str(out.dtype)]).store(0, emit(*values))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_kernel, "host", lambda: of)
        HostKernel("test_of_instruction", emit_all).bind(*inputs, out)(0, 1)
    return out


def pairs_in_fp64(total: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    halves = (x.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2) for x in (one, other))
    return total + np.prod([*halves], axis=0).sum(1)


@examples(20)
@given(st.integers(0, 1 << 16), st.booleans())
def test_instructions_are_their_formulas(seed: int, emulated: bool) -> None:
    """As the processor has them, and as they are computed where it does not."""
    rng = np.random.default_rng(seed)
    unsigned = rng.integers(0, 128, 32, np.uint8)
    signed = rng.integers(-127, 128, 32).astype(np.int8)
    codes = rng.integers(0, 16, 32, np.uint8)
    table = [float(x) for x in rng.normal(size=16).astype(np.float32)]
    wide = unsigned.astype(np.int32) * signed
    floats = (rng.normal(size=16) * 100).astype(np.float32)
    halves = [rng.normal(size=32).astype(ml_dtypes.bfloat16).view(np.int32) for _ in range(2)]
    whole = [int(x) for x in rng.integers(0, 100, 16)]

    def check(emit: Callable[..., Value], inputs: list[np.ndarray], expected: np.ndarray) -> None:
        found = results_of(emit, inputs, np.empty(expected.size, expected.dtype), emulated)
        np.testing.assert_array_equal(found, expected)

    small = unsigned // 2
    pairs = (small.astype(np.int32) * signed).reshape(-1, 2).sum(1).astype(np.int16)
    check(instructions.add_products_of_bytes, [small, signed], pairs)
    check(
        instructions.add_pairs,
        [pairs],
        pairs.astype(np.int32).reshape(-1, 2).sum(1, dtype=np.int32),
    )
    total = rng.integers(-1000, 1000, 8).astype(np.int32)
    fours = total + wide.reshape(-1, 4).sum(1, dtype=np.int32)
    check(instructions.dot_bytes, [total, unsigned, signed], fours)
    negated = np.where(signed < 0, -unsigned.astype(np.int8), unsigned.astype(np.int8))
    check(
        instructions.with_sign_of,
        [unsigned.astype(np.int8), signed],
        np.where(signed, negated, 0).astype(np.int8),
    )
    check(instructions.nearest_integers, [floats], np.rint(floats).astype(np.int32))
    check(
        lambda x: instructions.lookup_bytes(x.k, whole, x),
        [codes],
        np.array(whole, np.uint8)[codes],
    )
    check(
        lambda x: instructions.lookup_floats(x.k, table, x),
        [codes[:16].astype(np.int32)],
        np.array(table, np.float32)[codes[:16]],
    )
    found = results_of(
        instructions.dot_pairs, [floats, *halves], np.empty(16, np.float32), emulated
    )
    np.testing.assert_allclose(found, pairs_in_fp64(floats, *halves), rtol=1e-5, atol=1e-5)


def returning(number: int) -> machine_code.Library:
    """Returns the library of a function that returns a number."""
    module = ir.Module("test_of_returning")
    k = Function(module, "it", [I64], I64, processor=processor.host())
    k.give(k.index(number) + k.arguments[0])
    return machine_code.compiled(module)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flexgen_jax" / "kernels"


def call(library: machine_code.Library) -> int:
    return int(library.function("it", ctypes.c_int64, result=ctypes.c_int64)(0))


def test_object_files_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version has a file of its own, and a second process compiles nothing."""
    assert [call(returning(n)) for n in (1, 2, 1)] == [1, 2, 1]
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(machine_code, "optimized", None)
    assert call(returning(2)) == 2


def test_the_oldest_object_files_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "MAX_OBJECT_FILES", 2)
    for n in range(4):
        returning(n)
        (newest,) = set(cache.iterdir()) - set(cache.glob("*.old.o"))
        os.utime(newest.rename(newest.with_suffix(".old.o")), (n, n))
    assert sorted(int(file.stat().st_mtime) for file in cache.iterdir()) == [2, 3]


@pytest.mark.parametrize("content", [b"", b"x" * 10, None])
def test_damaged_object_files_are_compiled_again(cache: Path, content: bytes | None) -> None:
    returning(3)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + b"\x00" * 8 if content is None else content)
    assert call(returning(3)) == 3
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert call(returning(4)) == 4


OTHERS = {
    "AMX and AVX-512": (
        "avx512f,avx512bw,avx512bf16,avx512vnni,avx512vl,amx-tile,amx-bf16,amx-int8",
        "",
    ),
    "ARM": ("neon", "avx2,avx512f,amx-tile"),
}
"""Features that are emulated, and those that are left unused."""


@pytest.mark.slow
@pytest.mark.parametrize("which", OTHERS)
def test_kernels_of_other_processors_are_right_on_this_one(which: str) -> None:
    """The tests of this folder, with instructions that are missing here computed by their
    formulas."""
    emulated, unused = OTHERS[which]
    environment = {processor.EMULATED: emulated, processor.WITHOUT: unused}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(Path(__file__).parent)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
