"""What of this machine's memory a plan may use, and what is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import Policy, SamplingParams
from flexgen_jax.offload import executor, machine
from tests.models import prompts, run_greedy


@pytest.mark.parametrize(("free", "expected"), [(1_500_000_000, 1_100_000_000), (10**8, 0)])
def test_room_is_left_for_the_runtime(
    free: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth for the allocator and 250 MB for libraries, which a run in 1.5 GB had thrashed for
    want of; limits that are asked for stay as they are."""
    monkeypatch.setattr(machine, "available_memory", lambda: free)
    found = machine.detect_budgets(None, None, 0, tmp_path, "", unified=True)
    assert (found.device, found.host, found.shared) == (expected,) * 3
    found = machine.detect_budgets(7, 8, 0, tmp_path, "", unified=False)
    assert (found.device, found.host, found.shared) == (7, 8, None)


@pytest.mark.parametrize(("schedule", "count"), [("zigzag", 1), ("row", 2)])
def test_the_heap_is_trimmed_before_decoding(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, schedule: str, count: int
) -> None:
    trims: list[str] = []
    monkeypatch.setattr(executor, "trim_heap", lambda: trims.append(schedule))
    sequences = len(prompts())
    options: Any = {"schedule": schedule}
    policy = Policy(batch_size=-(-sequences // 2), num_batches=2, **options)
    run_greedy(checkpoint("base"), SamplingParams(max_tokens=3, ignore_eos=True), policy)
    assert len(trims) == count
