"""Runs CPU kernels for ARM (AArch64, NEON) in an emulator, and compares them with this processor's.

    apt-get install qemu-user gcc-aarch64-linux-gnu
    python scripts/checks/check_arm.py

The kernels are compiled as on an ARM machine, linked with a small C program, and run by
`qemu-aarch64`. Results differ by the order of sums only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from flexgen_jax.cpu.grouped import grouping_of
from flexgen_jax.cpu.jit.cache_format import CacheFormat
from flexgen_jax.cpu.jit.decode_attention import _emit_host
from flexgen_jax.cpu.jit.emit import F32, I8, I16, Function, Scalar, Value
from flexgen_jax.cpu.jit.factors import Factors
from flexgen_jax.cpu.jit.few_rows import emit_few_rows
from flexgen_jax.cpu.jit.grouped_rows import GroupedWeights
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel, _word, kernel_module
from flexgen_jax.cpu.jit.lane_rows import emit_lane_rows
from flexgen_jax.cpu.jit.levels import Codes
from flexgen_jax.cpu.jit.machine_code import object_code
from flexgen_jax.cpu.jit.many_rows import emit_many_rows
from flexgen_jax.cpu.jit.operands import Operands
from flexgen_jax.cpu.jit.tiles import Floats, PlainColumns
from flexgen_jax.cpu.processor import Processor
from flexgen_jax.layers.encoding import encode_rows
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.lanes import in_lanes
from flexgen_jax.models.formats.storage import Storage

NEON = frozenset({"neon"})
ARM = Processor("neoverse-n1", NEON, NEON, triple="aarch64-linux-gnu")

MAIN = r"""
#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>
int64_t kernel(int64_t *words, int64_t begin, int64_t end);
int main(int count, char **names) {
  FILE *in = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
  int64_t head[3], size, words[64];
  fread(head, 8, 3, in);
  for (int n = 0; n < head[0]; n++) {
    fread(&size, 8, 1, in);
    if (size < 0) { fread(words + n, 8, 1, in); continue; }
    char *memory = aligned_alloc(64, (size + 127) / 64 * 64);
    fread(memory, 1, size, in);
    words[n] = (int64_t)memory;
  }
  int64_t done = kernel(words, head[1], head[2]);
  fread(&size, 8, 1, in);
  fwrite((void *)words[size], 1, head[0] = (fread(&size, 8, 1, in), size), out);
  return done ? 0 : 1;
}
"""

Emit = Callable[[Function, Arguments, tuple[Value, Value]], None]
ROWS, DEPTH, COLUMNS = 5, 768, 96


def operands(call: Arguments) -> Operands:
    """Returns the operands of a product from the first six arguments."""
    rows, bias, out = call.array(0, I16), call.array(1, F32), call.array(2, F32)
    return Operands(rows, bias, out, *(call.index(n) for n in (3, 4, 5)))


def few(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    emit_few_rows(operands(call), call.array(6, I16), F32, limits)


def many(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    of = operands(call)
    emit_many_rows(of, PlainColumns(call.array(6, I16), of.depth), Floats, limits)


def lanes_of(bits: int) -> Emit:
    storage = in_lanes(Storage((COLUMNS, DEPTH), "bfloat16", own(bits)))
    grouping = grouping_of(storage)
    assert grouping is not None
    scalars: dict[str, Scalar] = {"uint8": I8, "int8": I8}

    def emit(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
        of = operands(call)
        leaves = [call.array(7 + n, scalars.get(x, I16)) for n, x in enumerate(grouping.kinds)]
        factors = Factors(grouping, leaves, of.depth, -float(grouping.center))
        codes = Codes([call.array(6, I8)], of.depth, bits, "integers", in_lanes=True)
        emit_lane_rows(of, GroupedWeights(codes, factors), "fma", 2, limits)

    return emit


def decode(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    _emit_host(CacheFormat(64, "bfloat16", 16), k, call, limits)


def product_cases() -> list[tuple[str, Emit, list[Any], int]]:
    """Returns products: a name, a kernel, its arguments, and the number of the result."""
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(COLUMNS, DEPTH)).astype(ml_dtypes.bfloat16)
    bias, cases = rng.normal(size=COLUMNS).astype(np.float32), []
    for name, emit, count in (("few rows", few, ROWS), ("many rows", many, 40)):
        rows = rng.normal(size=(count, DEPTH)).astype(ml_dtypes.bfloat16)
        out = np.zeros((count, COLUMNS), np.float32)
        arguments = [rows, bias, out, count, DEPTH, COLUMNS, plain]
        cases.append((name, emit, arguments, 2))
    for bits in (4, 8):
        storage = in_lanes(Storage((COLUMNS, DEPTH), "bfloat16", own(bits)))
        leaves = [np.ascontiguousarray(x) for x in encode_rows(jnp.asarray(plain), storage)]
        for count in (1, 2, ROWS):
            rows = rng.normal(size=(count, DEPTH)).astype(ml_dtypes.bfloat16)
            out = np.zeros((count, COLUMNS), np.float32)
            arguments = [rows, bias, out, count, DEPTH, COLUMNS, *leaves]
            cases.append((f"{bits} bits, {count} rows", lanes_of(bits), arguments, 2))
    return cases


def attention_case() -> tuple[str, Emit, list[Any], int]:
    rng, tokens, rows = np.random.default_rng(1), 37, 12
    query = rng.normal(size=(rows, 64)).astype(np.float32) / 8
    sides = [rng.normal(size=(2, tokens, 64)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    first, state = np.arange(rows), [np.full(rows, -1e30, np.float32), np.zeros(rows, np.float32)]
    out = np.zeros((rows, 64), np.float32)
    arguments = [query, *[sides[0]] * 3, *[sides[1]] * 3, first, *state, out]
    return "decode attention", decode, [*arguments, tokens, 35, 6, np.float32(0)], 10


def on_arm(emit: Emit, arguments: list[Any], result: int, rows: int, folder: Path) -> np.ndarray:
    """Returns the result of a kernel in the emulator."""
    (folder / "kernel.o").write_bytes(object_code(kernel_module("kernel", emit, ARM), ARM))
    (folder / "main.c").write_text(MAIN)
    command = ["aarch64-linux-gnu-gcc", "-O1", "-static", "-w", "main.c", "kernel.o", "-lm"]
    subprocess.run([*command, "-o", "run"], cwd=folder, check=True)
    pieces = [np.array([len(arguments), 0, rows], np.int64).tobytes()]
    for argument in arguments:
        is_array = isinstance(argument, np.ndarray)
        size = argument.nbytes if is_array else -1
        pieces.append(np.int64(size).tobytes())
        pieces.append(argument.tobytes() if is_array else np.int64(_word(argument)).tobytes())
    out = arguments[result]
    pieces.append(np.array([result, out.nbytes], np.int64).tobytes())
    (folder / "in").write_bytes(b"".join(pieces))
    subprocess.run(["qemu-aarch64", "./run", "in", "out"], cwd=folder, check=True)
    return np.fromfile(folder / "out", np.float32).reshape(out.shape)


def main() -> int:
    worst = 0.0
    for name, emit, arguments, result in [*product_cases(), attention_case()]:
        end = COLUMNS if result == 2 else len(arguments[0])
        with tempfile.TemporaryDirectory() as folder:
            found = on_arm(emit, arguments, result, end, Path(folder))
        HostKernel("here", emit).bind(*arguments)(0, end)
        expected = arguments[result]
        assert found.any(), name
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        worst = max(worst, error)
        print(f"{name:20} largest difference {error:.1e} of the largest result", flush=True)
    return int(not worst < 1e-4)


if __name__ == "__main__":
    sys.exit(main())
