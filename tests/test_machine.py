"""What of this machine's memory a plan may use, and what is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_jax import Policy, SamplingParams
from flexgen_jax.offload import executor, machine
from tests.models import BASE, prompts, run_greedy


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
