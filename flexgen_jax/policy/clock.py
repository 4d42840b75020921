"""What the simulator has in place of a machine: a clock over links and processors, and a KV cache
of which only the sizes are there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from flexgen_jax.policy.cost_model import Costs
from flexgen_jax.policy.hardware import TRANSFERS, HardwareProfile, Rate
from flexgen_jax.policy.placement import CacheKey, CachePlan
from flexgen_jax.policy.policy import Tier

RESOURCES = (*TRANSFERS, "compute", "host_compute")


@dataclass
class Loading:
    """A load in flight: its read, the bytes that have to be copied, when they are there."""

    read: list[float] | None = None
    copied: int = 0
    size: float | None = None
    ready: float = -1.0


class Clock:
    """The executor's thread: what it waits for, and what it keeps busy."""

    def __init__(self, hw: HardwareProfile, overlap: bool, unified: bool) -> None:
        self.now = 0.0
        self._hw, self._unified = hw, unified
        self._drag = hw.drag if overlap else {}
        self._slowed = hw.slowed if overlap else {}
        self._device = self._lost = 0.0
        self._links = {"host_to_device": 0.0, "device_to_host": 0.0, "disk_write": 0.0}
        self._lanes: tuple[deque[list[float]], ...] = (deque(), deque())
        self._disk = 0.0
        self.weight = 1  # for how many tokens the present one stands
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self.bytes = dict.fromkeys(TRANSFERS, 0)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def compute(self, seconds: float, ready: float = 0.0) -> float:
        """Dispatches a program; returns when it is done. A transfer's drag lengthens the next."""
        seconds += self._lost
        self._lost = 0.0
        self._device = max(self._device, self.now, ready) + seconds
        self.busy["compute"] += seconds * self.weight
        return self._device

    def host_compute(self, seconds: float, ready: float) -> None:
        """The CPU attends, and the thread with it."""
        if self._unified:
            ready = max(ready, self._device)
        self.now = max(self.now, ready) + seconds
        if self._unified:
            self._device = self.now
        self.busy["host_compute"] += seconds * self.weight

    def move(self, link: str, nbytes: int, ready: float = 0.0, size: float | None = None) -> float:
        """A transfer over one of the three plain links; returns when it is done."""
        if nbytes == 0 or (self._unified and link != "disk_write"):
            return max(self.now, ready)
        rate: Rate = getattr(self._hw, link)
        seconds = self._count(link, nbytes, rate.seconds(nbytes, size))
        self._links[link] = max(self._links[link], self.now, ready) + seconds
        return self._links[link]

    def pass_by(self, link: str, nbytes: int, ready: float = 0.0) -> float:
        """A small transfer, which does not wait for the large ones: a GPU has several queues."""
        if nbytes == 0 or self._unified:
            return max(self.now, ready)
        rate: Rate = getattr(self._hw, link)
        seconds = self._count(link, nbytes, rate.seconds(nbytes))
        self._links[link] += seconds
        return max(self.now, ready) + seconds

    def read(self, nbytes: int, urgent: bool, source: str, seconds: float) -> list[float]:
        """Queues a read from "disk_read" or "page_cache", of so many seconds if nothing else is
        read: [seconds left, when it is done]."""
        seconds = self._count("disk_read", nbytes, seconds, source)
        self._drain(self.now)
        entry = [seconds, -1.0]
        self._lanes[urgent].append(entry)
        return entry

    def _count(self, link: str, nbytes: int, seconds: float, source: str = "") -> float:
        self._lost += self._drag.get(source or link, 0.0) * seconds
        seconds *= self._slowed.get(source or link, 1.0)
        self.bytes[link] += nbytes * self.weight
        self.busy[link] += seconds * self.weight
        return seconds

    def read_done(self, entry: list[float] | None) -> bool:
        if entry is None:
            return True
        self._drain(self.now)
        return entry[1] >= 0

    def finish_read(self, entry: list[float] | None) -> None:
        """Waits for a read."""
        if entry is None:
            return
        self._drain(self.now)
        while entry[1] < 0:
            active = [lane for lane in self._lanes if lane]
            first = min(lane[0][0] for lane in active) * len(active)
            self._drain(self._disk + first + 1e-9)
        self.wait(entry[1])

    def _drain(self, until: float) -> None:
        """Lets the disk read until then, shared equally by the lanes that have something."""
        while self._disk < until:
            active = [lane for lane in self._lanes if lane]
            if not active:
                self._disk = until
                return
            share = (until - self._disk) / len(active)
            step = min(share, *(lane[0][0] for lane in active))
            self._disk = until if step == share else self._disk + step * len(active)
            for lane in active:
                lane[0][0] -= step
                if lane[0][0] <= 1e-9:
                    lane.popleft()[1] = self._disk


@dataclass(frozen=True)
class Cached:
    """One (layer, batch)'s cache. read, moved: bytes that a step reads from disk and moves to the
    device, and read_s: seconds of the reading, by how many blocks are sealed; there, homes,
    lengths: by block."""

    read: tuple[int, ...]
    read_s: tuple[float, ...]
    moved: tuple[int, ...]
    there: tuple[bool, ...]
    homes: tuple[Tier, ...]
    lengths: tuple[int, ...]


class CacheSizes:
    """The KV cache of a block of batches."""

    def __init__(self, costs: Costs, plan: CachePlan, batch_sizes: tuple[int, ...]) -> None:
        self._costs, self._plan, self._rows = costs, plan, batch_sizes
        self._found: dict[tuple[int, int], Cached] = {}
        self._costs_of: dict[tuple[int, int, int], tuple[int, float]] = {}

    def of(self, layer: int, batch: int) -> Cached:
        found = self._found.get((layer, batch))
        if found is None:
            found = self._found[layer, batch] = self._count(layer, batch)
        return found

    def _count(self, layer: int, batch: int) -> Cached:
        plan = self._plan
        lengths = plan.lengths(batch)
        keys = [CacheKey(layer, batch, block) for block in range(len(lengths))]
        costs = [self._cost(layer, self._rows[batch], length) for length in lengths]
        homes = tuple(plan.homes[key] for key in keys)
        reads = [
            cost if home == "disk" else (0, 0.0) for cost, home in zip(costs, homes, strict=True)
        ]
        moved = [int(plan.moved(key) * n) for key, (n, _) in zip(keys, costs, strict=True)]
        return Cached(
            read=(0, *accumulate(nbytes for nbytes, _ in reads)),
            read_s=(0.0, *accumulate(seconds for _, seconds in reads)),
            moved=(0, *accumulate(moved)),
            there=tuple(plan.is_there(key) for key in keys),
            homes=homes,
            lengths=lengths,
        )

    def _cost(self, decoder: int, rows: int, length: int) -> tuple[int, float]:
        """Bytes of a sealed block, and seconds of reading them."""
        spec = self._costs.spec
        what = (spec.alike[decoder + 1], rows, length)
        if what not in self._costs_of:
            layer = spec.decoders[decoder]
            seconds = self._costs.kv_read_s(layer, rows, (length,))
            self._costs_of[what] = self._costs.kv_bytes(layer, rows, length), seconds
        return self._costs_of[what]

    def sealed(self, batch: int, position: int) -> int:
        """How many blocks are full when so many tokens are cached."""
        sealed = total = 0
        for length in self._plan.lengths(batch):
            total += length
            if total > position:
                break
            sealed += 1
        return sealed
