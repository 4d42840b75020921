"""Measures this project against the PyTorch reference under the same memory limit.

    sudo python scripts/benchmark.py disk --folder /ssd/bench --json result.json

Every run is its own process in its own memory cgroup (page cache counted) and begins with a
cold page cache. Suites:

  disk      OPT-1.3B, prompt 128, 32 new tokens, weights on disk, 2.5 GB: this project against
            transformers with Accelerate's disk offload, at each of its batch sizes
  tight     the same with the KV cache on disk too, 1.5 GB, this project alone
  overlap   everything on disk, with and without overlap
  bits      everything on disk, 1.5 GB, weights and KV cache in 16 and in 4 bits
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from limits import run_limited

SHAPE = ["--model", "facebook/opt-1.3b", "--prompt-len", "128", "--gen-len", "32"]
HERE = Path(__file__).parent
Rows = Iterator[dict[str, Any]]


def placed(percent: str, num_batches: int = 2) -> list[str]:
    """Flags for FlexGen's six numbers and blocks of batches of 16."""
    shape = ["--batch-size", "16", "--num-batches", str(num_batches)]
    return ["--percent", *percent.split(), *shape]


def ours(
    folder: Path, limit: float, *flags: str, shape: list[str] = SHAPE, name: str = ""
) -> dict[str, Any]:
    """One `flexgen-jax bench` in a cgroup of `limit` bytes."""
    result = folder / "ours.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "flexgen_jax.cli", "bench", *shape, "--dummy-weights"]
    command += ["--dtype", "bfloat16", *flags, "--offload-dir", str(folder / "offload")]
    return measured(name or "flexgen_jax", [*command, "--json", str(result)], result, limit)


def reference(folder: Path, limit: float, batch_size: int) -> dict[str, Any]:
    """One run of transformers with Accelerate disk offload in a cgroup of `limit` bytes."""
    result = folder / "reference.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "benchmark_torch.py"), *SHAPE]
    command += ["--batch-size", str(batch_size), "--folder", str(folder)]
    name = f"transformers + Accelerate, batch {batch_size}"
    return measured(name, [*command, "--json", str(result)], result, limit)


def measured(name: str, command: list[str], result: Path, limit: float) -> dict[str, Any]:
    """Runs a command that writes its figures to `result`; a failed run says how it failed."""
    outcome = run_limited(command, int(limit), timeout=600)
    row: dict[str, Any] = {"name": name, "limit": int(limit), "command": " ".join(command)}
    row |= {"cgroup_peak_bytes": outcome.peak_bytes, "process_s": outcome.seconds}
    if result.exists():
        row |= json.loads(result.read_text())
    else:
        code = "timed out" if outcome.returncode is None else f"exit code {outcome.returncode}"
        row["failed"] = f"{code}: {outcome.output[-300:]}"
    throughput = row.get("generation_throughput")
    said = f"{throughput:.2f} token/s" if throughput else row["failed"]
    print(f"{name}: {said}", flush=True)
    return row


def suite_disk(folder: Path, args: argparse.Namespace) -> Rows:
    """This project and the reference in turn (A B A C A D)."""
    write = [sys.executable, str(HERE / "benchmark_torch.py"), *SHAPE, "--write-only"]
    subprocess.run([*write, "--folder", str(folder)], check=True)
    flags = placed("0 0 0 100 100 0")
    for batch_size in args.batch_sizes:
        yield ours(folder, 2.5e9, *flags)
        yield reference(folder, 2.5e9, batch_size)


def suite_tight(folder: Path, args: argparse.Namespace) -> Rows:
    flags = placed("0 0 0 0 100 0")
    yield ours(folder, 1.5e9, *flags)


def suite_overlap(folder: Path, args: argparse.Namespace) -> Rows:
    """Disk and compute time within a factor of two of each other."""
    shape = ["--model", "facebook/opt-1.3b", "--prompt-len", "32", "--gen-len", "16"]
    flags = placed("0 0 0 0 0 0", num_batches=8)
    for _ in range(args.repeat):
        yield ours(folder, 2e9, *flags, shape=shape, name="overlap")
        yield ours(folder, 2e9, *flags, "--no-overlap", shape=shape, name="no overlap")


def suite_bits(folder: Path, args: argparse.Namespace) -> Rows:
    """Everything on disk, in 16 bits and in 4."""
    for _ in range(args.repeat):
        for bits in ("16", "4"):
            widths = ["--weight-bits", bits, "--cache-bits", bits]
            flags = [*placed("0 0 0 0 0 0", num_batches=1), *widths]
            yield ours(folder, 1.5e9, *flags, name=f"{bits} bits")


SUITES: dict[str, Callable[[Path, argparse.Namespace], Rows]] = {
    "disk": suite_disk,
    "tight": suite_tight,
    "overlap": suite_overlap,
    "bits": suite_bits,
}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    packages = ("jax", "flax", "tensorstore", "torch", "transformers", "accelerate")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    head = "| run | token/s | prefill s | decode s | disk read GB | cgroup peak GB |"
    lines = [head, "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['name']} | failed: {row['failed'].splitlines()[-1]} | | | | |")
            continue
        phases = [f"{row[k]:.1f}" if k in row else "" for k in ("prefill_s", "decode_s")]
        read = f"{row['bytes']['disk_read'] / 1e9:.1f}" if "bytes" in row else ""
        cells = [row["name"], f"{row['generation_throughput']:.2f}", *phases, read]
        lines.append("| " + " | ".join([*cells, f"{row['cgroup_peak_bytes'] / 1e9:.2f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--folder", type=Path, required=True, help="On the disk to measure.")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for row in SUITES[args.suite](args.folder, args):
        rows.append(row)
        if args.json:  # after every run: a suite takes long
            content = {"suite": args.suite, "machine": machine(), "runs": rows}
            args.json.write_text(json.dumps(content, indent=2) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
