"""Measures what each CPU kernel brings to a whole run, over XLA's own code in its place.

    python scripts/benchmarks/gains.py --json result.json

OPT-1.3B's shape, for attention OPT-125M's, in bfloat16 and in memory. Each case runs twice, in turn
in processes of their own: with all kernels, and with one kernel removed, so that XLA computes
instead. Speeds are token/s of the phase that the kernel serves, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from flexgen_jax.cpu import backend, features
from flexgen_jax.cpu.matmul import FEW_ROWS
from flexgen_jax.layers.kernels import XlaKernels
from flexgen_jax.layers.quantization import Kept, QuantizedArray

IN_MEMORY = ("--percent", "100", "0", "100", "0", "100", "0", "--num-batches", "1")
FEW, MANY = range(1, FEW_ROWS + 1), range(FEW_ROWS + 1, 1 << 30)


@dataclass(frozen=True)
class Products:
    """Which products a case takes from the kernels: of packed or plain weights, of 16 or 8 bits."""

    is_packed: bool
    rows: range
    bits: int = 16

    def has(self, x: jax.Array, kernel: Kept, bits: int) -> bool:
        is_packed, rows = isinstance(kernel, QuantizedArray), x.size // x.shape[-1]
        return (is_packed, bits) == (self.is_packed, self.bits) and rows in self.rows


@dataclass(frozen=True)
class Case:
    """A kernel, and a run that uses it most.

    kernel: a method of `Kernels`, or a kind of products; phase: "prefill" or "decode".
    """

    name: str
    kernel: str | Products
    phase: str
    batch: int
    prompt: int
    new: int
    flags: tuple[str, ...] = ()

    def command(self, is_whole: bool, report: Path) -> list[str]:
        size = "125m" if isinstance(self.kernel, str) else "1.3b"
        flags = ["--model", f"facebook/opt-{size}", "--dummy-weights", "--dtype", "bfloat16"]
        flags += [*IN_MEMORY, "--batch-size", str(self.batch), "--prompt-len", str(self.prompt)]
        flags += ["--gen-len", str(self.new), *self.flags]
        program = ["-m", "flexgen_jax"] if is_whole else [__file__, "--without", self.name]
        return [sys.executable, *program, "bench", *flags, "--json", str(report)]


FOUR = ("--weight-bits", "4")
INTEGERS = (*FOUR, "--weight-format", "paper", "--matmul-bits", "8")
CHUNKS = ("--prefill-chunk", "512")
DECODE = ("decode_attention", "decode", 16, 1024, 33)
CASES = (
    Case("prompts' attention", "prefill_attention", "prefill", 8, 1024, 2),
    Case("attention of chunks", "chunk_attention", "prefill", 4, 1536, 2, CHUNKS),
    Case("decode attention", *DECODE),
    Case("decode attention, 4-bit cache", *DECODE, ("--cache-bits", "4")),
    Case("plain, 1 row", Products(False, FEW), "decode", 1, 64, 17),
    Case("plain, 16 rows", Products(False, FEW), "decode", 16, 64, 17),
    Case("plain, many rows", Products(False, MANY), "prefill", 4, 256, 2),
    Case("4 bits, 1 row", Products(True, FEW), "decode", 1, 64, 17, FOUR),
    Case("4 bits, 16 rows", Products(True, FEW), "decode", 16, 64, 17, FOUR),
    Case("4 bits, many rows", Products(True, MANY), "prefill", 4, 256, 2, FOUR),
    Case("8-bit integers, 4 bits", Products(True, MANY, 8), "prefill", 4, 256, 2, INTEGERS),
)  # fmt: skip


def without(kernel: str | Products) -> Callable[..., backend.CpuKernels]:
    """Returns `CpuKernels` without one kernel."""
    whole = backend.CpuKernels
    if isinstance(kernel, str):
        methods = {kernel: getattr(XlaKernels, kernel)}
    else:

        def matmul(
            self: Any, x: jax.Array, weights: Kept, bias: jax.Array | None, bits: int = 16
        ) -> jax.Array:
            kind = XlaKernels if kernel.has(x, weights, bits) else whole
            return kind.matmul(self, x, weights, bias, bits)

        methods = {"matmul": matmul}
    kept: Callable[..., backend.CpuKernels] = type("WithoutOne", (whole,), methods)
    return kept


def run_without(name: str, arguments: list[str]) -> None:
    """Runs a command of `flexgen-jax` without the kernel of a case."""
    from flexgen_jax.cli.main import main as run

    case = next(case for case in CASES if case.name == name)
    backend.CpuKernels = without(case.kernel)  # type: ignore[misc,assignment]
    run(arguments)


def measured(case: Case, is_whole: bool, folder: Path) -> float:
    report = folder / "report.json"
    subprocess.run(case.command(is_whole, report), check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(report.read_text())[f"{case.phase}_throughput"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="Cases whose name contains this.")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    if sys.argv[1:2] == ["--without"]:
        return run_without(sys.argv[2], sys.argv[3:])
    args = parser.parse_args()
    print(f"units: {features()}")
    print("| kernel | phase, run | with | by XLA | gain |\n| --- | --- | --- | --- | --- |")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for case in (case for case in CASES if args.only in case.name):
            speeds: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(args.repeat):
                for is_whole, found in speeds.items():
                    found.append(measured(case, is_whole, Path(name)))
            ours, xla = (statistics.median(found) for found in speeds.values())
            run = f"{case.phase}, {case.batch} x ({case.prompt} + {case.new})"
            print(
                f"| {case.name} | {run} | {ours:.2f} | {xla:.2f} | {ours / xla:.2f} |", flush=True
            )
            rows.append({"case": case.name, "run": run, "ours": ours, "xla": xla})
    if args.json:
        args.json.write_text(json.dumps({"units": str(features()), "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
