"""Tests the benchmark's choice of the reference's batch, its order of runs, and its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts" / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def fake_bench(speeds: dict[str, float], repeat: int) -> Any:
    """Returns a `Bench` whose runs only look up their token/s by name; 0 is a run that fails."""
    from benchmark import Bench

    bench = object.__new__(Bench)
    bench.folder, bench.repeat, bench.known, bench.dtype = Path(), repeat, None, "bfloat16"
    bench.gpu_memory, bench.dtypes = None, ("bfloat16", "float32")
    bench.keep_profile, bench.profiles = True, [None]

    def measured(case: Any, name: str, command: list[str], _settings: Any = None) -> dict[str, Any]:
        row = {"case": case.name, "name": name, "command": " ".join(command)}
        speed = speeds[name]
        if not speed:
            return row | {"failed": "timed out: nothing"}
        return row | {"generation_throughput": speed, "total_s": 1 / speed, "policy": {}}

    bench._measured = measured
    bench._bound = lambda case, row: {"of_bound": 0.5, "binding": "disk_read"}
    bench._disk_rate = lambda case, flags: None
    return bench


@pytest.mark.usefixtures("scripts")
def test_reference_is_doubled_until_it_fails_or_slows(monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmark
    from suites import Case, Ours

    monkeypatch.setattr(benchmark.Bench, "_write_checkpoint", lambda self, case: True)
    case = Case("c", "m", 8, 8, 10**9, (Ours("a"), Ours("b")), ("disk", "auto"), 2)
    speeds = {"ours, a": 6.0, "ours, b": 9.0}
    speeds["reference, auto, float32, batch 3"] = 2.5
    for batch, disk, auto in ((2, 1.0, 2.0), (4, 3.0, 0.0), (8, 2.5, 0.0), (16, 2.0, 0.0)):
        speeds |= {f"reference, disk, bfloat16, batch {batch}": disk}
        speeds |= {f"reference, auto, float32, batch {batch}": auto}
    speeds |= {"reference, disk, float32, batch 2": 0.5, "reference, auto, bfloat16, batch 2": 1.5}
    rows: list[dict[str, Any]] = []
    fake_bench(speeds, 2).case(case, rows.append)
    best = "reference, disk, bfloat16, batch 4"
    tried = ["disk, bfloat16, batch 2", "disk, float32, batch 2"]  # the better one goes on
    tried += [f"disk, bfloat16, batch {n}" for n in (4, 8, 16)]
    tried += ["auto, bfloat16, batch 2", "auto, float32, batch 2"]
    tried = [
        f"reference, {way}" for way in (*tried, *(f"auto, float32, batch {n}" for n in (4, 3)))
    ]
    assert [row["name"] for row in rows] == [*tried, *["ours, a", "ours, b", best] * 2]
    table = benchmark.markdown(rows)
    assert "| ours, b | 9.00 | 9.00 to 9.00 | 3.00 | 50 % | disk read |  |" in table
    assert "auto, float32, batch 4: timed out" in table

    bench = fake_bench(speeds, 1)
    bench.known, rows = benchmark.known_best("auto:2:float32"), []
    bench.case(case, rows.append)
    known = "reference, auto, float32, batch 2"
    assert [row["name"] for row in rows] == ["ours, a", "ours, b", known]
    assert benchmark.known_best("disk:16").of("float16") == ("disk", 16, "float16")
    assert benchmark.known_best("disk:16:float32").of("float16") == ("disk", 16, "float32")
    with pytest.raises(ValueError, match="there is no dtype 'fp32'"):
        benchmark.known_best("disk:16:fp32")


@pytest.mark.usefixtures("scripts")
def test_a_part_of_a_suite_can_be_run() -> None:
    from suites import cpu_full, narrowed

    (case,) = narrowed(cpu_full(), "6.7B", "4 bits")
    assert case.name == "OPT-6.7B, 4 GB"
    assert [way.name for way in case.ours] == ["4 bits"]
    assert narrowed(cpu_full(), "", "") == cpu_full()
    assert [case.name for case in narrowed(cpu_full(), "", "batch 3")] == ["in memory, batch 32"]
    with pytest.raises(ValueError, match=r"--only 'OPT-7B' .* there are 'OPT-1.3B, 1.5 GB', "):
        narrowed(cpu_full(), "OPT-7B", "")
    with pytest.raises(ValueError, match=r"--ours '3 bits' .* there are '16 bits', '4 bits'"):
        narrowed(cpu_full(), "6.7B", "3 bits")


@pytest.mark.usefixtures("scripts")
def test_old_profiles_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmark
    from flexgen_jax.policy.machines import known_machine
    from suites import Case, Ours

    now = [0.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])
    bench, measured = fake_bench({"ours, a": 6.0}, 5), []
    bench.keep_profile, bench.profiles, bench.folder = False, [], tmp_path
    profile = known_machine("t4-16gb").to_json()

    def unsteady(text: str) -> str:
        content = json.loads(text)
        content["disk_read"]["spread"] = [0.5]
        return json.dumps(content)

    def measure() -> None:
        measured.append(now[0])
        found = profile if len(measured) != 1 else unsteady(profile)
        (tmp_path / "profile.json").write_text(found)

    bench._measure_profile = measure
    case = Case("c", "m", 8, 8, 10**9, (Ours("a"),), ())

    def keep(row: dict[str, Any]) -> None:
        now[0] += 240.0

    bench.case(case, keep)
    assert len(bench.profiles) == 2
    assert measured == [0.0, 0.0, 720.0]  # rounds begin every four minutes
    assert max(profile.spread() for profile in bench.profiles) < 0.5


@pytest.mark.usefixtures("scripts")
def test_bound_takes_the_disk_as_it_was_around_the_run(tmp_path: Path) -> None:
    """A block has 16 sequences, so 2.4 GB of weights are read in each of the 31 steps after the
    prompt's."""
    from flexgen_jax.models.formats.storage import FORMAT_VERSION
    from flexgen_jax.models.shapes import known_shape
    from flexgen_jax.models.weight_source import DummyWeights
    from flexgen_jax.policy.machines import known_machine
    from flexgen_jax.policy.policy import Policy
    from suites import Case, Ours

    bench = fake_bench({"ours, a": 6.0}, 1)
    del bench._bound
    bench.profiles, bench.folder = [known_machine("generic-cpu")], tmp_path
    policy = Policy.from_percent(0, 0, 100, 0, 100, 0, batch_size=16)
    case = Case("c", "facebook/opt-1.3b", 128, 32, 10**9, (Ours("a"),), ())
    weights = 24 * 12 * 2048**2 * 2
    profiled = max(speed for _, speed in bench.profiles[0].disk_read.points)
    for rates, rate in (([1e9, 3e9], 3e9), ([4e9], 4e9), ([], profiled)):
        row = {"policy": json.loads(policy.to_json()), "num_sequences": 16, "total_s": 100.0}
        found = bench._bound(case, row | {"disk_read_rates": rates})
        decoding = found["bound_s"]["decode"]["disk_read"]
        assert decoding == pytest.approx(31 * weights / rate, rel=1e-2)  # and biases
    del bench._disk_rate
    assert bench._disk_rate(case, []) is None
    name = DummyWeights(known_shape(case.model)).fingerprint("bfloat16")
    for suffix, bits in (("", "16"), (f"-4bit-own-v{FORMAT_VERSION}", "4")):
        folder = tmp_path / "offload" / "weights" / f"{name}{suffix}" / "t" / "c"
        folder.mkdir(parents=True)
        (folder / "0").write_bytes(bytes(4095))  # too small to say anything
        assert bench._disk_rate(case, ["--weight-bits", bits]) is None
        (folder / "1").write_bytes(bytes(3 << 20))
        assert 0 < bench._disk_rate(case, ["--weight-bits", bits]) < 1e13


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("most", "first", "tried"),
    [(16, 16, [16, 32, 24]), (3, 16, [16, 8, 4, 2, 3]), (24, 16, [16, 32, 24]), (0, 2, [2, 1])],
)
def test_search_stays_within_what_fits(most: int, first: int, tried: list[int]) -> None:
    import benchmark

    found = benchmark.search(lambda batch: float(batch <= most) * batch, first)
    assert list(found) == tried


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_suites_name_known_models_and_flags(has_gpu: bool) -> None:
    import suites
    from flexgen_jax.cli.bench import bench
    from flexgen_jax.models.shapes import known_shape

    for make in suites.suites(has_gpu).values():
        cases = make()
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            room = known_shape(case.model).max_positions
            assert case.prompt_len + case.gen_len <= room
            for ours in case.ours:
                bench.make_context("bench", ["--model", case.model, *ours.flags])


@pytest.mark.usefixtures("scripts")
def test_utilisation_is_drawn_from_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pictures
    from flexgen_jax.offload.trace import Trace

    trace = Trace(tmp_path / "trace.json")
    trace.span("compute: layers", "a", 1.0, 1.5)
    trace.span("disk read: weights", "b", 1.2, 3.0)
    trace.close()
    out = tmp_path / "use.png"
    command = ["x", "utilisation", str(tmp_path / "trace.json"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    pictures.main()
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("scripts")
def test_our_runs_are_held_to_the_memory_of_the_case_by_jax_itself() -> None:
    """As PyTorch holds the reference's; on a card of that size or less, to what a card can give."""
    from suites import gpu_16gb

    bench, case = fake_bench({}, 1), gpu_16gb(True)[0]
    for card, share in ((80e9, "0.2000"), (16e9, "0.9500"), (12e9, "0.9500")):
        bench.gpu_memory = int(card)
        found = bench._gpu_settings(case)
        assert found["XLA_CLIENT_MEM_FRACTION"] == share
        assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] is None
    assert bench._gpu_settings(gpu_16gb(False)[0]) == {}


@pytest.mark.usefixtures("scripts")
def test_a_gpu_suite_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmark import find_gpu

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert find_gpu("gpu-16gb") is None
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert find_gpu("gpu-16gb") is None
    assert "no GPU (" in capsys.readouterr().err  # and why
    assert find_gpu("cpu-quick") is None
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("scripts")
def test_settings_of_the_kernel_may_be_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers: the run goes on, and says that it may have begun with a warm cache."""
    import limits

    def refused(self: Path, text: str) -> int:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(limits.Path, "write_text", refused)
    command = [sys.executable, "-c", "import os; print(os.environ['ASKED'], 'OLD' in os.environ)"]
    monkeypatch.setenv("OLD", "1")
    outcome = limits.run_limited(command, None, 60, {"ASKED": "yes", "OLD": None})
    assert (outcome.returncode, outcome.output.strip(), outcome.is_cold) == (0, "yes False", False)
