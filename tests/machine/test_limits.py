"""Tests how much of this machine's memory a plan may use, and what is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexgen_jax import LLM, Policy, SamplingParams, UserError
from flexgen_jax.engine import session
from flexgen_jax.machine import limits
from flexgen_jax.machine.jax_settings import PINNED
from flexgen_jax.machine.profiler import measure_in_child
from flexgen_jax.offload import executor
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.schedule.buffers import Ring
from tests.helpers.models import BASE, prompts, run_greedy, write_checkpoint


@pytest.mark.parametrize(("free", "expected"), [(1_500_000_000, 1_100_000_000), (10**8, 0)])
def test_room_is_left_for_the_runtime(
    free: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth is left for the allocator, and 250 MB for libraries, without which a small machine
    thrashes; limits that are asked for stay as they are."""
    monkeypatch.setattr(limits, "available_memory", lambda: free)
    found = limits.detect_budgets(None, None, 0, tmp_path, "", unified=True)
    assert (found.device, found.host, found.shared) == (expected,) * 3
    found = limits.detect_budgets(7, 8, 0, tmp_path, "", unified=False)
    assert (found.device, found.host, found.shared) == (7, 8, None)


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_the_heap_is_trimmed_now_and_then(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    trims: list[float] = []
    monkeypatch.setattr(executor, "TRIM_S", seconds)
    monkeypatch.setattr(executor, "trim_heap", lambda: trims.append(seconds))
    sequences = len(prompts())
    policy = Policy(batch_size=sequences, num_batches=1)
    run_greedy(checkpoint("base"), SamplingParams(max_tokens=3, ignore_eos=True), policy)
    steps = 3 * (BASE["num_hidden_layers"] + 2)
    assert len(trims) == (steps if not seconds else 0)


def test_what_killed_runs_have_left_is_freed_before_the_disk_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = OffloadFolder(tmp_path)
    dead = tmp_path / "runs" / "dead"
    dead.mkdir()
    dead.with_suffix(".lock").touch()
    (dead / "blocks").write_bytes(bytes(100))
    seen: list[bool] = []
    real = limits._free_disk
    monkeypatch.setattr(limits, "_free_disk", lambda *a: seen.append(dead.exists()) or real(*a))
    limits.detect_budgets(None, None, None, tmp_path, "", unified=True)
    assert seen == [False]
    assert len(list((tmp_path / "runs").iterdir())) == 2  # the live one's folder and lock
    live.close()


def test_more_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--host-memory .* exceeds"):
        limits.detect_budgets(None, 1 << 60, 0, tmp_path, "", unified=False)
    stats = {"bytes_limit": 12 << 30}
    gpu = SimpleNamespace(memory_stats=lambda: stats, platform="gpu")
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(limits.jax, name, lambda: [gpu])
    with pytest.raises(UserError, match=r"--device-memory 16.* XLA_CLIENT_MEM_FRACTION"):
        limits.detect_budgets(16 << 30, None, 0, tmp_path, "", unified=False)
    assert limits.detect_budgets(12 << 30, 9, 0, tmp_path, "", unified=False).device == 12 << 30
    assert limits.detect_budgets(None, 9, 0, tmp_path, "", unified=False).device == int(
        limits.SAFETY * stats["bytes_limit"]
    )


def test_the_host_tier_respects_the_limit_of_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(memory_stats=lambda: None)
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(limits.jax, name, lambda: [gpu])
    monkeypatch.setattr(limits, "is_cpu", lambda: False)
    monkeypatch.setattr(limits, "available_memory", lambda: 100 << 30)
    monkeypatch.setattr(limits, "_meminfo", lambda name: 128 << 30)
    said: list[object] = []

    def host(asked: int | None) -> int | None:
        where = (tmp_path, "", False, said.append)
        return limits.detect_budgets(None, asked, 0, *where).host

    monkeypatch.setenv(PINNED, "20")
    assert host(None) == 16 << 30
    assert len(said) == 1
    assert PINNED in str(said[0])
    assert host(15 << 30) == 15 << 30
    with pytest.raises(UserError, match=PINNED):
        host(17 << 30)
    monkeypatch.setenv(PINNED, "200")
    assert host(None) == limits.free_ram()
    assert len(said) == 1


def test_buffers_for_prompts_of_many_lengths_stay_within_the_plan(tmp_path: Path) -> None:
    """Each length has shapes, and so buffers, of its own."""
    folder = write_checkpoint(tmp_path / "m", max_position_embeddings=140)
    ids = [[5] * length for length in range(32, 129, 32)]
    policy = Policy.from_percent(100, 0, 100, 0, 0, 0, batch_size=1, num_batches=len(ids))
    with LLM(folder, dtype="float32", policy=policy, offload_dir=tmp_path / "o") as llm:
        llm.generate(prompt_token_ids=ids, sampling_params=SamplingParams(max_tokens=1))
        report = llm.report()
    for tier, peak in report["peak_bytes"].items():
        assert peak <= report["computed_peak_bytes"][tier]


@pytest.mark.cpu_device
def test_each_run_says_anew_which_weights_the_page_cache_may_hold(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small run leaves more RAM free than a large one with the same weights."""
    asked: list[int] = []
    real = session.page_cached
    monkeypatch.setattr(session, "page_cached", lambda *a: asked.append(a[-1]) or real(*a))
    policy = Policy.from_percent(0, 0, 100, 0, 100, 0, batch_size=8)
    with LLM(checkpoint("base"), dtype="float32", policy=policy, offload_dir=tmp_path) as llm:
        for count in (1, 8):
            llm.generate(prompt_token_ids=prompts()[:count], sampling_params=SamplingParams(1))
    assert asked[0] > asked[1]


def test_pinned_open_blocks_are_a_part_of_the_plan_for_buffers(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise read buffers would be freed and acquired again step by step."""
    given_up: list[int] = []
    monkeypatch.setattr(Ring, "_relieve", lambda _ring, nbytes: given_up.append(nbytes))
    policy = Policy.from_percent(
        *(0, 50, 0, 100, 100, 0), batch_size=2, num_batches=4, kv_block_tokens=8
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    run_greedy(checkpoint("base"), params, policy, offload_dir=tmp_path, unified=False)
    assert given_up == []


def test_a_measurement_that_fails_in_its_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot use the offload folder"):
        measure_in_child("float32", tmp_path / "file/off", True, lambda _: None)
