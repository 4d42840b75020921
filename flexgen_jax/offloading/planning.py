"""Where the layers of any model should lie: a linear program over a machine's rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flexgen_jax.caches import cache_folder
from flexgen_jax.cpu import is_cpu
from flexgen_jax.errors import UserError
from flexgen_jax.machine.profiles import cached_profile, measured_profile
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.machines import read_profile
from flexgen_jax.policy.policy import Placement
from flexgen_jax.progress import Progress
from flexgen_jax.units import parse_bytes

SECOND_BEST = 1e-6
"""How much the seconds of links that do not bind count: among equally fast plans, the plan with the
fewest transfers wins."""


@dataclass(frozen=True)
class LayerPlan:
    """A plan for passes through a stack of layers.

    placement: of the layers' bytes; seconds: of a pass; bounds: the seconds that each resource
    takes for it, "compute", "disk_read", "disk_write", "host_to_device", "device_to_host"; they
    overlap, and the largest one is the time of the pass.
    """

    placement: Placement
    seconds: float
    bounds: dict[str, float]

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self.bounds, key=lambda name: self.bounds[name])


def profile(
    folder: str | Path | None = None, dtype: str = "bfloat16", progress: bool = True
) -> HardwareProfile:
    """Returns this machine's rates: as it was measured for this folder's disk and dtype before,
    or measured now, in three to seven minutes.

    folder: where leaves on disk would lie; by default in the user's cache.
    """
    path = Path(folder or cache_folder("offload")).expanduser()
    cached = cached_profile(dtype, path)
    return cached or measured_profile(dtype, path, is_cpu(), Progress(progress))


def plan_layers(
    layer_bytes: Sequence[int],
    layer_flops: float,
    *,
    hardware: HardwareProfile | str | Path,
    rows: int = 1,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    writes: bool = False,
    ahead: int = 2,
) -> LayerPlan:
    """Returns the placement with the fastest pass through all layers, where `TieredArrays.stream`
    moves the layers outside the device (FlexGen, section 4, for layers only).

    layer_bytes: of each layer.
    layer_flops: of each layer and pass, two for a multiplication and an addition.
    hardware: what `profile` returns, the name of a machine, or a file that `flexgen-jax profile`
        wrote.
    rows: tokens or examples that are multiplied together, on which the rate of products depends.
    device_memory, host_memory: bytes, or "8GB", that the layers may take with those on their way;
        by default the profile's.
    writes: whether every layer is written back in a pass, as in training.
    ahead: as for `stream`.

    Raises `UserError` if the memory has no room for layers on their way.
    """
    machine = hardware if isinstance(hardware, HardwareProfile) else read_profile(hardware)
    limits = [
        parse_bytes(device_memory, "device_memory") or machine.device_memory,
        parse_bytes(host_memory, "host_memory") or machine.host_memory,
    ]
    total, largest = float(sum(layer_bytes)), float(max(layer_bytes, default=0))
    if total <= 0 or layer_flops < 0 or rows < 1 or ahead < 0:
        raise UserError("layers need a positive size, flops >= 0, rows >= 1 and ahead >= 0")
    seconds = _seconds(machine, total, largest, writes)
    seconds["compute"] = (
        0.0,
        0.0,
        len(layer_bytes) * layer_flops / machine.linear[16].at(rows),
    )
    count = min(ahead + 2, len(layer_bytes))
    in_flight_bytes = count * largest
    candidates = [
        solved
        for moves, reads in ((False, False), (True, False), (True, True))
        if (
            solved := _solved(
                seconds, total, _room(limits, largest, in_flight_bytes, machine, moves, reads)
            )
        )
    ]
    if not candidates:
        raise UserError(
            f"no placement fits: layers of {largest / 1e9:.3g} GB, {count} of which are on "
            f"their way, need more than {limits[0] / 1e9:.3g} GB on the device or "
            f"{limits[1] / 1e9:.3g} GB on the host; lower `ahead`, or give more"
        )
    device, host = min(candidates, key=lambda shares: _time(seconds, shares))
    bounds = {
        name: at_none + device * of_device + host * of_host
        for name, (of_device, of_host, at_none) in seconds.items()
    }
    return LayerPlan(Placement(device, host), max(bounds.values()), bounds)


class _Room(NamedTuple):
    """The memory for layers. moves, reads: whether any is moved to the device, or read."""

    device: float
    host: float
    moves: bool
    reads: bool


def _room(
    limits: Sequence[float],
    largest: float,
    in_flight: float,
    profile: HardwareProfile,
    moves: bool,
    reads: bool,
) -> _Room:
    """Returns the memory that remains besides layers in flight; if layers are divided, whole leaves
    may exceed a share by one leaf."""
    device = limits[0] - (largest if moves or reads else 0)
    device -= in_flight if moves and not profile.unified else 0
    host = limits[1] - (largest if moves or reads else 0) - (in_flight if reads else 0)
    return _Room(device, host, moves, reads)


def _time(seconds: Mapping[str, Line], shares: tuple[float, float]) -> float:
    """Returns the seconds of a pass, and a little for each link that it uses."""
    device, host = shares
    times = [at_none + device * a + host * b for a, b, at_none in seconds.values()]
    return max(times) + SECOND_BEST * sum(times)


Line = tuple[float, float, float]
"""Seconds by the shares on the device and the host: two slopes, and the seconds where both are
0."""


def _seconds(
    profile: HardwareProfile, total: float, largest: float, writes: bool
) -> dict[str, Line]:
    """Returns how long each link takes for a pass."""
    _, slowed = profile.contention("disk_read", is_prefill=False)
    read = slowed * total / profile.disk_read.at(largest)
    seconds: dict[str, Line] = {"disk_read": (-read, -read, read)}
    if writes:
        write = total / profile.disk_write.at(largest)
        seconds["disk_write"] = (-write, -write, write)
    if not profile.unified:
        there = total / profile.host_to_device.at(largest)
        seconds["host_to_device"] = (-there, 0.0, there)
        if writes:
            back = total / profile.device_to_host.at(largest)
            seconds["device_to_host"] = (-back, 0.0, back)
    return seconds


def _solved(seconds: Mapping[str, Line], total: float, room: _Room) -> tuple[float, float] | None:
    """Returns the shares on the device and the host with the least time; None if there are none."""
    from scipy.optimize import linprog

    # Variables: device, host, time. A link's line must stay below the time.
    costs = [sum(line[i] for line in seconds.values()) * SECOND_BEST for i in (0, 1)]
    above = [[of_device, of_host, -1.0] for of_device, of_host, _ in seconds.values()]
    above_limits = [-at_none for *_, at_none in seconds.values()]
    within = [[total, 0.0, 0.0], [0.0, total, 0.0]]
    least_device, least_both = 0.0 if room.moves else 1.0, 0.0 if room.reads else 1.0
    optimum = linprog(
        c=[*costs, 1.0],
        A_ub=[*above, *within, [1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]],
        b_ub=[*above_limits, room.device, room.host, 1.0, -least_both],
        bounds=[(least_device, 1), (0, 1), (0, None)],
    )
    if not optimum.success:
        return None
    device, host = (min(1.0, max(0.0, float(x))) for x in optimum.x[:2])
    return device, min(host, 1.0 - device)
