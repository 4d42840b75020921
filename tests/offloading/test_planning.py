"""Plans for stacks of layers against a search over a grid."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_jax.errors import UserError
from flexgen_jax.machine import profiles
from flexgen_jax.offloading import plan_layers, profile
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.machines import known_machine

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
        disk = 1 - on_device - on_host
        way = 0.0 if unified else 4 * GB * (1 - on_device)
        has_device = on_device * total + way <= device
        has_host = on_host * total + 4 * GB * disk <= host
        return on_device + on_host <= 1 and has_device and has_host

    steps = [n / 40 for n in range(41)]
    best = min(seconds(*x) for x in itertools.product(steps, steps) if fits(*x))
    chosen = (plan.placement.device, plan.placement.host)
    assert plan.seconds == pytest.approx(seconds(*chosen), rel=1e-6)
    assert plan.seconds <= best * (1 + 1e-6)
    assert plan.bounds[plan.bound] == plan.seconds
    slack = 1 - 1e-6
    assert fits(chosen[0] * slack, chosen[1] * slack)


def test_what_cannot_fit_says_so() -> None:
    with pytest.raises(UserError, match="no placement fits: layers of 1 GB, 4 of which"):
        plan_layers(LAYERS, 1e9, hardware="t4-16gb", device_memory="1GB", host_memory="1GB")
    with pytest.raises(UserError, match="layers need bytes"):
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
