"""Tests the automatic policy in runs: it backs off, keeps tokens, and says what it predicted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.caches import read_cached
from flexgen_jax.cpu import HostAttention, HostBlock, features
from flexgen_jax.errors import UserError
from flexgen_jax.machine import compute_probe, disk_probe, profiler, profiles
from flexgen_jax.machine.compute_probe import ComputeProbe, Sample, timed
from flexgen_jax.models.families import read_config
from flexgen_jax.offload.executor import BlockRun
from flexgen_jax.policy.hardware import MEASURED, UNSTEADY, DiskReads, Rate
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import Placement
from flexgen_jax.progress import Progress
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.waves import Step
from tests.helpers.as_on_gpu import has_gpu
from tests.helpers.command_line import run
from tests.helpers.models import BASE, prompts

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [r.token_ids for r in llm.generate(prompt_token_ids=prompts(), sampling_params=GREEDY)]


@pytest.mark.parametrize("failures", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_out_of_memory_goes_on_with_less(
    checkpoint: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failures: int,
) -> None:
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4)) as llm:
        expected = tokens(llm)
    real, left, policies = BlockRun.run, [failures], []

    def run(self: BlockRun) -> Iterator[None]:
        yield from real(self)
        policies.append(self._plan.policy)
        if left[0]:
            left[0] -= 1
            raise MemoryError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")

    monkeypatch.setattr(BlockRun, "run", run)
    with LLM(checkpoint(), dtype="float32") as llm:
        forget_all(monkeypatch)
        assert tokens(llm) == expected
    assert capsys.readouterr().err.count("out of memory, continuing with less") == failures
    assert len(policies) > failures


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every request run again, as if none had been finished when memory ran out."""
    from flexgen_jax.requests import generation

    begun: list[generation.EncodedRequest] = []
    begin, real = generation.Generation.begin, generation.Generation.restart

    def beginning(
        self: generation.Generation, requests: Sequence[generation.EncodedRequest]
    ) -> None:
        begun[:] = requests
        begin(self, requests)

    def restart(self: generation.Generation) -> list[object]:
        real(self)
        self.begin(begun)
        return list(begun)

    monkeypatch.setattr(generation.Generation, "begin", beginning)
    monkeypatch.setattr(generation.Generation, "restart", restart)


def test_finished_requests_are_not_run_again(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4)) as llm:
        expected = tokens(llm)
    real, rows = BlockRun.compute, []

    def compute(self: BlockRun, step: Step, inputs: Any) -> Any:
        if step[:2] == (0, 1):
            rows.append(step.batch.rows)
            if len(rows) == 2:
                raise MemoryError("no more")
        return real(self, step, inputs)

    monkeypatch.setattr(BlockRun, "compute", compute)
    with LLM(checkpoint(), dtype="float32") as llm:
        search = llm._runner.planner.policy_for
        monkeypatch.setattr(
            llm._runner.planner,
            "policy_for",
            lambda workload: search(workload) and Policy(batch_size=4, num_batches=1),
        )
        assert tokens(llm) == expected
    assert rows == [4, 4, 4]


def test_a_given_policy_does_not_back_off(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: BlockRun) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(BlockRun, "run", run)
    with LLM(checkpoint(), policy=Policy()) as llm, pytest.raises(MemoryError, match="no more"):
        tokens(llm)

    def fail(self: BlockRun) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 bytes\nand more")

    monkeypatch.setattr(BlockRun, "run", fail)
    with LLM(checkpoint(), policy=Policy()) as llm, pytest.raises(UserError) as caught:
        tokens(llm)
    assert str(caught.value).startswith("out of memory: RESOURCE_EXHAUSTED: 5 bytes; lower --batch")


def test_other_errors_are_raised(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: BlockRun) -> None:
        raise ValueError("something else")

    monkeypatch.setattr(BlockRun, "run", run)
    with LLM(checkpoint()) as llm, pytest.raises(ValueError, match="something else"):
        tokens(llm)


def test_report_has_the_prediction_of_a_named_profile(
    checkpoint: Callable[[], Path], tmp_path: Path
) -> None:
    with LLM(checkpoint(), dtype="float32", hardware="generic-cpu") as llm:
        tokens(llm)
        report = llm.report()
    predicted = report["predicted"]
    assert report["kernels"] == ("triton" if has_gpu() else f"cpu ({features()})")
    assert predicted["hardware"] == "generic-cpu"
    assert predicted["total_s"] == pytest.approx(predicted["prefill_s"] + predicted["decode_s"])


def test_weights_stay_where_they_are(checkpoint: Callable[[], Path]) -> None:
    with LLM(checkpoint(), dtype="float32") as llm:
        llm.generate(prompt_token_ids=[[5] * 8], sampling_params=GREEDY)
        session = llm._runner.session
        llm.generate(prompt_token_ids=[[5] * 30] * 6, sampling_params=GREEDY)
        assert llm._runner.session is session


def invoke(*args: str) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.output


PLAN = ("plan", "--model", "facebook/opt-1.3b", "--hardware", "t4-16gb", "--prompt-len", "64")


def test_plan_json_is_a_policy_file(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    said = invoke(*PLAN, "--num-sequences", "8", "--device-memory", "2GB", "--json", str(out))
    found = json.loads(out.read_text())
    assert {"policy", "predicted", "binding", "peak_bytes", "num_sequences", "alternatives"} <= {
        *found
    }
    assert set(found["peak_bytes"]) == {"device", "host", "disk"}
    predicted = found["predicted"]
    assert predicted["total_s"] == pytest.approx(predicted["prefill_s"] + predicted["decode_s"])
    assert predicted["generation_throughput"] == pytest.approx(8 * 32 / predicted["total_s"])
    policy = Policy.from_json(out.read_text())
    assert f"--batch-size {policy.batch_size}" in said
    assert found["peak_bytes"]["device"] <= 2e9
    again = invoke(*PLAN, "--num-sequences", "8", "--policy", str(out))
    assert f"{predicted['generation_throughput']:.3g} token/s" in again


LITTLE = ("--device-memory", "2GB", "--num-sequences", "16")


def test_latency_curve(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    said = invoke(*PLAN, "--latency-curve", str(picture), *LITTLE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "block s" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--hardware", "abacus"), "neither a file nor a known machine"),
        (("--prompt-len", "5000"), "context of 2048"),
        (("--max-latency", "0.0001"), "relax --max-latency"),
        (("--device-memory", "1MB"), "do not fit"),
        (("--dtype", "float32"), "profiled in float16"),
        (
            ("--percent", "100", "0", "100", "0", "100", "0", "--device-memory", "1GB"),
            "does not fit.*needed",
        ),
    ],
)
def test_plan_says_what_is_wrong(flags: tuple[str, ...], said: str) -> None:
    result = run(*PLAN, *flags)
    assert result.exit_code == 2
    assert re.search(said, result.output), result.output
    assert "Traceback" not in result.output


def test_a_plan_has_the_products_it_is_for() -> None:
    assert "--matmul-bits 8" in invoke(*PLAN, *LITTLE, "--matmul-bits", "8")


@pytest.mark.slow
@pytest.mark.cpu_device
def test_the_machine_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe runs, at sizes that take no time."""
    monkeypatch.setattr(disk_probe, "DISK_SIZES", ((1 << 16, 1 << 18), (1 << 20, 1 << 22)))
    monkeypatch.setattr(profiler, "COPY_SIZES", (1 << 10,))
    monkeypatch.setattr(profiler, "PREFILLS", ((1, 32), (2, 32)))
    monkeypatch.setattr(profiler, "ROWS", (2,))
    monkeypatch.setattr(compute_probe, "PROMPTS", ((1, 32),))
    caches = ((1, 32), (2, 32), (2, 64))
    monkeypatch.setattr(compute_probe, "CACHES", caches)
    small = read_config({**BASE, "max_position_embeddings": 256})
    monkeypatch.setattr(profiler, "known_shape", lambda name: small)
    for module in (profiler, compute_probe, disk_probe):
        monkeypatch.setattr(module, "timed", _timed_briefly)
    told: list[str] = []
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time
    try:
        found = profiler.measure("bfloat16", tmp_path, True, told.append)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert len(told) == profiler.stages("bfloat16")
    assert found.unified
    assert set(found.linear) == {16, 8, 4}
    assert set(found.linear_int8) == ({16, 4} if features().int8 else set())
    for name, phase in product(found.slowed, (True, False)):
        drag, times = found.contention(name, phase)
        assert 0 <= drag <= times
    low, high = found.disk_range
    assert 0 < low <= 1 <= high
    assert type(known_machine("t4-16gb")).from_json(found.to_json()) == found
    assert not list(tmp_path.rglob("profile-*"))


def _timed_briefly(run: Callable[[], object], *_: object, **__: object) -> Sample:
    return timed(run, repeat=2, at_least=0.05, warm_up=1)


def test_attention_rates_count_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts' rates count XLA's operations, those of decoding the elements attended to."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "num_attention_heads": 2}
    config = read_config({**BASE, **sizes, "max_position_embeddings": 256})
    operations: list[float] = []
    elements: list[int] = []

    def by_xla(run: Any, **_: object) -> Sample:
        operations.append(run.func.cost_analysis()["flops"])
        return Sample(0.5, 0.0)

    def by_host(run: Callable[[], object], **_: object) -> Sample:
        run()
        return Sample(0.5, 0.0)

    def attend(_: HostAttention, _query: object, blocks: list[HostBlock], *_where: object) -> None:
        elements.append(sum(array.size for array in jax.tree.leaves([x.arrays for x in blocks])))

    monkeypatch.setattr(HostAttention, "attend", attend)
    monkeypatch.setattr(compute_probe, "PROMPTS", ((2, 32), (1, 128), (3, 64), (1, 512)))
    monkeypatch.setattr(compute_probe, "CACHES", ((1, 32), (2, 40), (3, 64)))
    probe = ComputeProbe(config, "float32", copies=1)
    try:
        monkeypatch.setattr(compute_probe, "timed", by_xla)
        prompt = dict(probe.prefill_attention().points)
        assert [prompt[n] for n in (32, 128, 64)] == pytest.approx(2 * np.array(operations), 0.05)
        monkeypatch.setattr(compute_probe, "timed", by_host)
        assert list(probe.host_attention(16).points) == [(n, 2 * n) for n in elements]
    finally:
        probe.close()


def test_a_later_plan_may_need_the_disk(
    checkpoint: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights stay, but a session that was opened without a disk tier cannot serve the new plan."""
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4)) as llm:
        expected = tokens(llm)
    plans = [Policy(batch_size=4), Policy.from_percent(100, 0, 0, 0, 100, 0, batch_size=4)]
    with LLM(checkpoint(), dtype="float32", offload_dir=tmp_path) as llm:
        monkeypatch.setattr(llm._runner.planner, "policy_for", lambda workload: plans.pop(0))
        assert tokens(llm) == expected
        assert tokens(llm) == expected


def test_an_unusable_disk_is_no_reason_not_to_run(
    checkpoint: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("flexgen_jax.engine.planner.MIN_PROBED_RUN_S", 0.0)
    monkeypatch.setattr("flexgen_jax.engine.planner.known_profile", lambda *_: None)
    monkeypatch.setattr("flexgen_jax.engine.planner.assumed_profile", fail)
    with LLM(checkpoint(), dtype="float32") as llm:
        assert len(tokens(llm)) == len(prompts())
    assert "no space left on device" in capsys.readouterr().err


def test_an_assumed_machine_is_probed_once_and_corrected_by_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In seconds, and with rates that this machine has; a measured profile takes its place."""
    monkeypatch.setattr(profiles, "cache_folder", lambda name: tmp_path / name)
    assumed = profiles.assumed_profile("float32", tmp_path, True, Progress(False))
    assert "planning for this machine, assumed from memory" in capsys.readouterr().err
    rows = 512
    x = np.ones((rows, 2048), np.float32)
    started = time.perf_counter()
    x @ x.T
    flops = 2 * rows * x.size / (time.perf_counter() - started)
    assert 0.05 < assumed.linear[16].at(rows) / flops < 50
    monkeypatch.setattr(profiles, "assumed_machine", None)
    assert profiles.assumed_profile("float32", tmp_path, True, Progress(False)) == assumed
    profiles.record_products("float32", tmp_path, 0.5)
    profiles.record_products("float32", tmp_path, 1.0)  # of a run that was planned with that
    slower = profiles.known_profile("float32", tmp_path)
    assert slower is not None
    assert slower.linear[4].at(64) == pytest.approx(assumed.linear[4].at(64) / 2)
    measured = replace(assumed, about={"source": MEASURED})
    monkeypatch.setattr(profiles, "measure", lambda *_: measured)
    profiles.measured_profile("float32", tmp_path, True, Progress(False))
    assert profiles.known_profile("float32", tmp_path) == measured


@pytest.mark.parametrize("spread", [0.3, 0.4])
def test_a_busy_machines_profile_is_not_kept(
    spread: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Plans from such a profile would be bad in every later run."""
    rates = {bits: Rate(((1.0, 1.0),), (spread,)) for bits in (16, 8, 4)}
    busy = replace(known_machine("t4-16gb"), linear=rates, disk_read=Rate(((1.0, 1.0),), (0.1,)))
    monkeypatch.setattr(profiles, "measure", lambda *_: busy)
    monkeypatch.setattr(profiles, "cache_folder", lambda name: tmp_path / name)
    assert profiles.measured_profile("float16", tmp_path, False, Progress(False)) == busy
    is_kept = spread < UNSTEADY
    assert profiles.cached_profile("float16", tmp_path) == (busy if is_kept else None)
    assert ("varied by 40 %" in capsys.readouterr().err) is not is_kept


def test_a_policy_that_writes_too_much_is_refused(
    checkpoint: Callable[[], Path], tmp_path: Path
) -> None:
    policy = Policy.from_percent(100, 0, 0, 0, 0, 0, batch_size=4, num_batches=2, kv_block_tokens=4)
    options: dict[str, Any] = {"policy": policy, "offload_dir": tmp_path, "dtype": "float32"}
    with (
        LLM(checkpoint(), write_limit="1MB", **options) as llm,
        pytest.raises(UserError, match=r"writes .* GB a day .* --write-limit allows 1 MB"),
    ):
        tokens(llm)
    with LLM(checkpoint(), write_limit="1000TB", **options) as llm:
        assert len(tokens(llm)) == len(prompts())


def test_a_misspelt_machine_is_found_at_once(checkpoint: Callable[[], Path]) -> None:
    with pytest.raises(UserError, match="abacus"):
        LLM(checkpoint(), hardware="abacus")


def test_what_runs_see_of_the_disk_is_kept_with_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = replace(known_machine("t4-16gb"), disk_read=Rate.constant(1e9))
    monkeypatch.setattr(profiles, "measure", lambda *_: measured)
    monkeypatch.setattr(profiles, "cache_folder", lambda name: tmp_path / name)
    reads = [DiskReads(4e9, 1e7, False)]
    profiles.record_disk_reads("float16", tmp_path, reads, 8.0)  # there is no profile
    profiles.measured_profile("float16", tmp_path, False, Progress(False))
    assert profiles.cached_profile("float16", tmp_path) == measured
    profiles.record_disk_reads("float16", tmp_path, [DiskReads(1e6, 1e7, False)], 1.0)  # too few
    for _ in range(30):
        profiles.record_disk_reads("float16", tmp_path, reads, 8.0)
    found = profiles.cached_profile("float16", tmp_path)
    assert found is not None and found.disk_read.at(1e7) == pytest.approx(0.5e9)
    assert found.disk_range == pytest.approx((1.0, 2.0))
    (file,) = (tmp_path / "profiles").glob("*.disk.json")
    assert read_cached(file) == [0.5] * profiles.RUNS_KEPT
    file.write_text("{half")
    assert profiles.cached_profile("float16", tmp_path) == measured
    profiles.measured_profile("float16", tmp_path, False, Progress(False))
    assert not file.exists()


def test_a_run_tells_the_disks_rate_if_it_waited_for_the_disk(
    checkpoint: Callable[[], Path], tmp_path: Path
) -> None:
    policy = Policy.from_percent(0, 0, 0, 0, 100, 0, batch_size=2, num_batches=2)
    with LLM(checkpoint(), dtype="float32", policy=policy, offload_dir=tmp_path) as llm:
        tokens(llm)
        session = llm._runner.session
        assert session is not None
        report, nbytes = session._report, session._report["bytes"]["disk_read"]
        assert session._weights.cached and session.disk_reads()[0] == []
        session._weights.cached = frozenset()
        for share, stored, is_told in (
            (0.9, nbytes, True),
            (0.9, None, True),
            (0.4, nbytes, False),
            (0.9, nbytes // 2, False),
        ):
            report["busy_s"]["disk_read"] = share * report["total_s"]
            report["storage_read_bytes"] = stored
            reads, busy_s = session.disk_reads()
            assert busy_s == report["busy_s"]["disk_read"]
            assert sum(read.nbytes for read in reads) == (nbytes if is_told else 0)
        report["storage_read_bytes"] = nbytes
        for changes in ({"overlap": False}, {"activations": Placement(0.5, 0.0)}):
            session.policy = replace(policy, **changes)
            assert session.disk_reads()[0] == []


def test_short_prefixes_of_long_texts_are_not_worth_it() -> None:

    def requests(tokens: int, new: int) -> list[EncodedRequest]:
        rows = [(*[7] * tokens, *range(n, n + 10)) for n in range(8)]
        return [EncodedRequest(n, row, SamplingParams(), new) for n, row in enumerate(rows)]

    with LLM("facebook/opt-1.3b", dummy_weights=True, hardware="t4-16gb") as llm:
        assert llm._runner.is_worth_sharing(7 * 1000, requests(1000, 16))
        assert not llm._runner.is_worth_sharing(7 * 20, requests(20, 512))
        assert not llm._runner.is_worth_sharing(7 * 20, requests(1000, 1))
