"""Tests what the check of a GPU reads from a device's trace, and how its script is used."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "benchmarks"))
    monkeypatch.syspath_prepend(str(SCRIPTS))


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


class FakeParts:
    """Parts that take known seconds of a clock that stands still otherwise, and end as scripted."""

    def __init__(self, ends: dict[str, Any]) -> None:
        self.now, self.ends, self.ran = 100.0, ends, list[str]()

    def __call__(self, part: Any, limit_s: float) -> int:
        self.ran.append(part.name)
        seconds, end = self.ends[part.name]
        self.now += min(seconds, limit_s)
        if isinstance(end, BaseException):
            raise end
        code: int = 124 if seconds > limit_s else end
        return code


def lines_of(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [(entry["part"], entry["outcome"]) for entry in map(json.loads, lines)]


@pytest.mark.usefixtures("scripts")
def test_two_calls_do_all_parts_once(tmp_path: Path) -> None:
    """The first one is killed in a part and while it writes, the second one runs out of time."""
    import gpu_check

    parts = [gpu_check.Part(name, 60, ()) for name in "abcde"]
    fake = FakeParts({"a": (30, 0), "b": (10, KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_parts(parts, tmp_path, 200, fake, lambda: fake.now)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "b", "outc')
    fake.ends = {"b": (20, 3), "c": (90, 0), "d": (50, 0)}
    outcomes = gpu_check.run_parts(parts, tmp_path, 120, fake, lambda: fake.now)
    assert fake.ran == ["a", "b", "b", "c", "d"]  # d has 40 of its 60 seconds, e none
    expected = [("a", "passed"), ("b", "failed, exit status 3"), ("c", "stopped after 60 s")]
    assert lines_of(tmp_path) == expected
    fake.ends = {"d": (50, -9), "e": (1, 0)}
    outcomes = gpu_check.run_parts(parts, tmp_path, 120, fake, lambda: fake.now)
    assert fake.ran[5:] == ["d", "e"]
    assert lines_of(tmp_path) == [*expected, ("d", "killed"), ("e", "passed")]
    assert outcomes == dict(lines_of(tmp_path))


@pytest.mark.usefixtures("scripts")
def test_parts_are_processes_that_end(tmp_path: Path) -> None:
    import gpu_check

    run = gpu_check.Processes(tmp_path, has_gpu=False)
    shows = "import os, sys; print(sys.argv[1], os.environ['FLEXGEN_TEST_AS_ON_GPU']); sys.exit(3)"
    assert run(gpu_check.Part("shows", 60, ("-c", shows, "{out}/x")), 60) == 3
    assert (tmp_path / "shows.log").read_text() == f"{tmp_path}/x 1\n"
    child = "import subprocess, sys; subprocess.run(['sleep', '1000'])"
    began = time.monotonic()
    assert run(gpu_check.Part("waits", 60, ("-c", child)), 1) == 124
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_every_part_names_files_that_are_there(has_gpu: bool) -> None:
    import gpu_check

    for is_quick in (False, True):
        parts = gpu_check.parts_of(is_quick, has_gpu)
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            paths = [word for word in part.command if word.startswith(("tests/", "scripts/"))]
            assert paths
            assert all((SCRIPTS.parent / path).exists() for path in paths), part


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [(("--help",), 0, "--quick"), (("--out", "x", "--only", "none"), 2, "no part's name contains")],
)
def test_the_script_says_how_it_is_used(
    flags: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *flags]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == code
    assert said in found.stdout + found.stderr


@pytest.mark.slow
def test_tokens_of_small_models_are_those_of_the_file() -> None:
    command = [sys.executable, str(SCRIPTS / "checks" / "check_tokens.py")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
