"""Plans for stacks of layers against a search over a grid."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.errors import UserError
from flexgen_jax.machine import profiles
from flexgen_jax.offloading import TieredParams, plan_layers, profile
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.machines import known_machine
from tests.helpers.cases import examples

GB = 10**9
LAYERS = [1 * GB] * 20


def machine(unified: bool = False) -> HardwareProfile:
    return replace(known_machine("t4-16gb"), unified=unified)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("memory", [(8, 12), (30, 2 * 30), (5, 100), (100, 5)])
def test_no_placement_of_a_grid_is_faster(
    memory: tuple[int, int], writes: bool, unified: bool
) -> None:
    known, total = machine(unified), sum(LAYERS)
    device, host = (size * GB for size in memory)
    plan = plan_layers(
        LAYERS, 1e12, hardware=known, device_memory=device, host_memory=host, writes=writes
    )
    _, slowed = known.contention("disk_read", False)

    def seconds(on_device: float, on_host: float) -> float:
        disk = 1 - on_device - on_host
        times = [20 * 1e12 / known.linear[16].at(1), slowed * disk * total / known.disk_read.at(GB)]
        if writes:
            times.append(disk * total / known.disk_write.at(GB))
        if not unified:
            times.append((1 - on_device) * total / known.host_to_device.at(GB))
        if writes and not unified:
            times.append((1 - on_device) * total / known.device_to_host.at(GB))
        return max(times)

    def fits(on_device: float, on_host: float) -> bool:
        moves, reads = on_device < 1 - 1e-5, on_device + on_host < 1 - 1e-5
        way = 4 * GB * moves * (not unified) + GB * moves
        has_device = on_device * total + way <= device
        has_host = on_host * total + 4 * GB * reads + GB * moves <= host
        return on_device + on_host <= 1 and has_device and has_host

    steps = [n / 40 for n in range(41)]
    best = min(seconds(*x) for x in itertools.product(steps, steps) if fits(*x))
    chosen = (plan.placement.device, plan.placement.host)
    assert plan.seconds == pytest.approx(seconds(*chosen), rel=1e-6)
    assert plan.seconds <= best * (1 + 1e-6)
    assert plan.bounds[plan.bound] == plan.seconds
    slack = 1 - 1e-7
    assert fits(chosen[0] * slack, chosen[1] * slack)


@examples(25)
@given(
    count=st.integers(1, 12),
    device=st.integers(2, 40),
    host=st.integers(2, 40),
    rows=st.sampled_from([64, 100]),
)
def test_planned_layers_fit_where_they_are_placed(
    tmp_path_factory: pytest.TempPathFactory, count: int, device: int, host: int, rows: int
) -> None:
    """Limits in units of a fifth of a layer."""
    layer = {name: np.zeros((rows, 512), np.float32) for name in "abc"}
    nbytes = sum(leaf.nbytes for leaf in layer.values())
    limits = {"device_memory": device * nbytes // 5, "host_memory": host * nbytes // 5}
    try:
        plan = plan_layers([nbytes] * count, 1e6, hardware=machine(), ahead=1, **limits)
    except UserError:
        return
    layers, folder = {str(n): layer for n in range(count)}, tmp_path_factory.mktemp("plan")
    with TieredParams(layers, plan.placement, folder=folder, unified=False, **limits) as params:
        assert sum(1 for _ in params.stream(ahead=1)) == count


def test_what_cannot_fit_says_so() -> None:
    with pytest.raises(UserError, match="no placement fits: layers of 1 GB, 4 of which"):
        plan_layers(LAYERS, 1e9, hardware="t4-16gb", device_memory="1GB", host_memory="1GB")
    with pytest.raises(UserError, match="layers need a positive size"):
        plan_layers([], 1e9, hardware="t4-16gb")
    with pytest.raises(UserError, match="hardware none is neither a file"):
        plan_layers(LAYERS, 1e9, hardware="none")


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = machine()
    monkeypatch.setattr(profiles, "measure", lambda *given: known)
    monkeypatch.setattr(profiles, "_cache_file", lambda dtype, folder: tmp_path / "profile.json")
    assert profile(tmp_path, progress=False) == known
    monkeypatch.setattr(profiles, "measure", None)
    assert profile(tmp_path, progress=False).disk_read == known.disk_read
