"""Tests what the check of a GPU reads from a device's trace, and how its script is used."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "benchmarks"))


def line(name: str, *events: tuple[str, float, float]) -> Any:
    found = [SimpleNamespace(name=n, start_ns=1e9 * s, duration_ns=1e9 * d) for n, s, d in events]
    return SimpleNamespace(name=name, events=found)


@pytest.mark.usefixtures("scripts")
def test_a_trace_tells_copies_from_kernels() -> None:
    """Of the device's streams; lines that sum them up, and the host's, count nothing twice."""
    import device_trace

    streams = (
        line("Stream #14(MemcpyH2D)", ("MemcpyH2D", 0, 2), ("MemcpyH2D", 5, 1)),
        line("Stream #15(MemcpyH2D)", ("MemcpyH2D", 1, 2)),
        line("Stream #7(Compute)", ("gemm", 2, 4), ("MemcpyD2D", 7, 1)),
        line("Stream #9(MemcpyD2H)", ("MemcpyD2H", 3, 0.5)),
        line("XLA Ops", ("fusion", 2, 4)),
    )
    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("python", ("f", 0, 9))]),
        SimpleNamespace(name="/device:GPU:0", lines=streams),
    ]
    found = device_trace.spans(planes)
    assert {kind: device_trace.seconds(parts) for kind, parts in found.items()} == {
        "host_to_device": 4,  # 0 to 3, and 5 to 6
        "device_to_host": 0.5,
        "compute": 5,
    }
    assert device_trace.seconds_together(found["compute"], found["host_to_device"]) == 2


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("seed", range(5))
def test_seconds_together_are_those_of_a_count(seed: int) -> None:
    import device_trace

    rng = random.Random(seed)
    first, second = (
        [(start, start + rng.randint(0, 9)) for start in rng.choices(range(60), k=12)]
        for _ in range(2)
    )

    def at(spans: list[tuple[int, int]]) -> set[int]:
        return {time for start, end in spans for time in range(start, end)}

    assert device_trace.seconds(first) == len(at(first))
    assert device_trace.seconds_together(first, second) == len(at(first) & at(second))


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--help",), 0, "--quick"),
        (("--quik",), 2, "no option --quik"),
        (("--only", "nothing", sys.executable), 2, "no part's name contains nothing"),
        (("/no/python",), 2, "finds no device"),
    ],
)
def test_the_script_says_how_it_is_used(flags: tuple[str, ...], code: int, said: str) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = ["bash", str(SCRIPTS / "gpu_check.sh"), *flags]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == code
    assert said in found.stdout + found.stderr
