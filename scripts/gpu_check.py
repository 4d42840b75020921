"""Checks this project on a GPU in a limited time.

    python scripts/gpu_check.py --out FOLDER [--seconds 350] [--only NAME] [--quick]

Each part is a process with a time limit, and none stops the others. Its output is in
FOLDER/NAME.log. Its outcome is a line of FOLDER/results.jsonl, which is written at once. A second
call with the same folder skips the parts that have ended, and uses the programs that the first one
compiled. Without a GPU, the CPU copies between two memories, and the tests use the kernels of a
GPU. The exit status is 0 if all parts have passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

LEAST_S = 15.0
"""With less time left, no part begins."""

UNTRIED = "--xla_gpu_autotune_level=0"
"""XLA does not try which formulation of a product is fastest, which takes most of the time of
compiling."""


@dataclass(frozen=True)
class Part:
    """A part of the check: Python's arguments, where {out} is the folder of the results.

    limit_s: how long it may take; is_exact: whether results are compared, so that XLA need not look
    for the fastest products.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    is_exact: bool = False


def tests(name: str, limit_s: float, *paths: str) -> Part:
    """A part that runs tests; those that fail are in FOLDER/NAME.xml, with tracebacks."""
    command = (
        "-m",
        "pytest",
        "-n",
        "4",
        "-p",
        "no:cacheprovider",
        "--junitxml={out}/" + name + ".xml",
    )
    return Part(name, limit_s, (*command, *paths), is_exact=True)


def parts_of(is_quick: bool, has_gpu: bool) -> list[Part]:
    """Returns all parts, the most needed first."""
    quick = ("--quick",) * is_quick
    copies = () if has_gpu else ("--copies",)
    small = () if has_gpu else ("--context", "32", "--layers", "1", "--bits", "16", "--rows", "1")
    bench, check = "scripts/benchmarks/", "scripts/checks/"
    model = "facebook/opt-6.7b" if has_gpu else "facebook/opt-125m"
    rooms = ("offload", "engine", "schedule", "search", "requests", "models", "machine", "cli")
    return [
        tests("tests-copying", 60, "tests/offload/test_copying.py"),
        tests("tests-layers", 90, "tests/layers"),
        tests("tests-kernels", 90, "tests/gpu"),
        Part("tokens", 60, (check + "check_tokens.py",), is_exact=True),
        Part("layers", 90, (bench + "gpu_layers.py", "--model", model, *small)),
        Part("measure", 90, (bench + "gpu_measure.py", "--json", "{out}/measure.json", *quick)),
        *(
            Part(
                f"placements-{format_}",
                60,
                (check + "check_placements.py", "--formats", format_, *copies, "--quick"),
                is_exact=True,
            )
            for format_ in ("16", "4", "sparse-4", "8", "sparse-16")
        ),
        *(
            Part(
                f"family-{family}",
                60,
                (check + "check_families.py", "--family", family),
                is_exact=True,
            )
            for family in ("llama", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma2")
        ),
        *(() if is_quick else (tests(f"tests-{room}", 300, f"tests/{room}") for room in rooms)),
    ]


Run = Callable[[Part, float], int]
"""Runs a part for some seconds at most; returns its exit status, 124 if it was stopped."""


def ended(folder: Path) -> dict[str, str]:
    """Returns the outcome of each part that has ended in an earlier call. Cuts off a line that is
    not whole, since that call was killed while it wrote."""
    path = folder / "results.jsonl"
    content = path.read_text() if path.exists() else ""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return {entry["part"]: entry["outcome"] for entry in entries}


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    seconds: float,
    run: Run,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Runs the parts that have not ended yet, while there is time; returns the outcome of each that
    has. A part that is stopped before its own limit has not ended."""
    outcomes, deadline = ended(folder), clock() + seconds
    for part in parts:
        began = clock()
        left = deadline - began
        if part.name in outcomes or left < LEAST_S:
            continue
        code = run(part, min(part.limit_s, left))
        took = clock() - began
        if code == 124 and left < part.limit_s:
            continue
        names = {0: "passed", 124: f"stopped after {took:.0f} s", -signal.SIGKILL: "killed"}
        outcomes[part.name] = names.get(code, f"failed, exit status {code}")
        entry = {"part": part.name, "outcome": outcomes[part.name], "seconds": round(took, 1)}
        with (folder / "results.jsonl").open("a") as file:
            file.write(f"{json.dumps(entry)}\n")
        print(f"{part.name:22} {took:5.0f} s  {outcomes[part.name]}", flush=True)
    return outcomes


class Processes:
    """Runs parts as processes of their own."""

    def __init__(self, folder: Path, has_gpu: bool) -> None:
        self._folder = folder
        paths = (ROOT, ROOT / "scripts" / "benchmarks", os.environ.get("PYTHONPATH", ""))
        self._environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": ":".join(map(str, paths)),
            "FLEXGEN_TEST_CACHE": str(folder / "programs"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        }
        if not has_gpu:
            self._environment["FLEXGEN_TEST_AS_ON_GPU"] = "1"

    def __call__(self, part: Part, limit_s: float) -> int:
        environment = dict(self._environment)
        if part.is_exact:
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {UNTRIED}"
        command = [sys.executable, *(word.format(out=self._folder) for word in part.command)]
        with (self._folder / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return 124
            finally:  # its children, too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of the results.")
    parser.add_argument("--seconds", type=float, default=3600.0, help="Of this call.")
    parser.add_argument("--only", default="", help="The parts whose name contains this.")
    parser.add_argument("--quick", action="store_true", help="Small measurements, and few tests.")
    options = parser.parse_args()
    import jax

    device = jax.devices()[0]
    has_gpu = device.platform != "cpu"
    parts = [part for part in parts_of(options.quick, has_gpu) if options.only in part.name]
    if not parts:
        parser.error(f"no part's name contains {options.only}")
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"device": device.device_kind, "jax": jax.__version__, "python": sys.version}
    (folder / "machine.json").write_text(json.dumps(machine))
    outcomes = run_parts(parts, folder, options.seconds, Processes(folder, has_gpu))
    waiting = [part.name for part in parts if part.name not in outcomes]
    print(f"{device.device_kind}: {len(outcomes)} parts have ended; left: {waiting or 'none'}")
    sys.exit(any(outcome != "passed" for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
