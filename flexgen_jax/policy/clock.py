"""The simulator's stand-in for a machine: a clock over links and processors, and the sizes of a
KV cache. Times are in seconds since the start."""

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
    """A load in flight.

    read: the queue entry of its disk read, see `Clock.read`; copied: bytes to copy to the device;
    size: bytes of one operation, which decide the rate, or None for those of the whole load;
    ready: the time at which it is on the device, -1 before its copy is queued.
    """

    read: list[float] | None = None
    copied: int = 0
    size: float | None = None
    ready: float = -1.0


class Clock:
    """Time as the executor's thread sees it: what it waits for, and what it keeps busy."""

    def __init__(self, hw: HardwareProfile, overlap: bool, unified: bool) -> None:
        self.now = 0.0
        self._hw, self._unified = hw, unified
        self._drag = hw.drag if overlap else {}
        self._slowed = hw.slowed if overlap else {}
        self._device = self._lost = 0.0
        self._links = {"host_to_device": 0.0, "device_to_host": 0.0, "disk_write": 0.0}
        self._lanes: tuple[deque[list[float]], ...] = (deque(), deque())
        self._disk = 0.0
        self.weight = 1  # number of tokens that the current one stands for
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self.bytes = dict.fromkeys(TRANSFERS, 0)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def compute(self, seconds: float, ready: float = 0.0) -> float:
        """Dispatches a program that takes `seconds`; returns the time at which it is done.

        It also takes the seconds that transfers' drag has cost since the last program.
        """
        seconds += self._lost
        self._lost = 0.0
        self._device = max(self._device, self.now, ready) + seconds
        self.busy["compute"] += seconds * self.weight
        return self._device

    def host_compute(self, seconds: float, ready: float) -> None:
        """Attends on the CPU from the time `ready` on, while the thread waits."""
        if self._unified:
            ready = max(ready, self._device)
        self.now = max(self.now, ready) + seconds
        if self._unified:
            self._device = self.now
        self.busy["host_compute"] += seconds * self.weight

    def move(self, link: str, nbytes: int, ready: float = 0.0, size: float | None = None) -> float:
        """Queues a transfer on a link other than "disk_read"; returns the time at which it is done.

        size: bytes of one operation, which decide the rate (default: `nbytes`).
        """
        if nbytes == 0 or (self._unified and link != "disk_write"):
            return max(self.now, ready)
        rate: Rate = getattr(self._hw, link)
        seconds = self._count(link, nbytes, rate.seconds(nbytes, size))
        self._links[link] = max(self._links[link], self.now, ready) + seconds
        return self._links[link]

    def pass_by(self, link: str, nbytes: int, ready: float = 0.0) -> float:
        """Makes a small transfer; returns the time at which it is done.

        It does not wait for large transfers, because a GPU has several queues.
        """
        if nbytes == 0 or self._unified:
            return max(self.now, ready)
        rate: Rate = getattr(self._hw, link)
        seconds = self._count(link, nbytes, rate.seconds(nbytes))
        self._links[link] += seconds
        return max(self.now, ready) + seconds

    def read(self, nbytes: int, urgent: bool, source: str, seconds: float) -> list[float]:
        """Queues a read from the source "disk_read" or "page_cache", in the urgent lane or not.

        seconds: how long it takes if nothing else is read. Returns the queue's entry: seconds left,
        and the time at which it is done, -1 before.
        """
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
        """Waits until the read of a queue entry is done."""
        if entry is None:
            return
        self._drain(self.now)
        while entry[1] < 0:
            active = [lane for lane in self._lanes if lane]
            first = min(lane[0][0] for lane in active) * len(active)
            self._drain(self._disk + first + 1e-9)
        self.wait(entry[1])

    def _drain(self, until: float) -> None:
        """Lets the disk read until a time; lanes that have reads share it equally."""
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
    """Sizes of the KV cache of one layer and batch.

    read, read_s, moved: by the number of sealed blocks, the bytes that a step reads from disk, the
    seconds of that, and the bytes that it moves to the device; there, homes, lengths: by block,
    whether its values stay on the host, its tier, and its tokens.
    """

    read: tuple[int, ...]
    read_s: tuple[float, ...]
    moved: tuple[int, ...]
    there: tuple[bool, ...]
    homes: tuple[Tier, ...]
    lengths: tuple[int, ...]


class CacheSizes:
    """Sizes of the KV cache of a block of batches, computed when they are first asked for."""

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
            there=tuple(plan.stays_on_host(key) for key in keys),
            homes=homes,
            lengths=lengths,
        )

    def _cost(self, decoder: int, rows: int, length: int) -> tuple[int, float]:
        """Returns the bytes of a sealed KV block, and the seconds of reading it from disk."""
        spec = self._costs.spec
        what = (spec.alike[decoder + 1], rows, length)
        if what not in self._costs_of:
            layer = spec.decoders[decoder]
            seconds = self._costs.kv_read_s(layer, rows, (length,))
            self._costs_of[what] = self._costs.kv_bytes(layer, rows, length), seconds
        return self._costs_of[what]

    def sealed(self, batch: int, position: int) -> int:
        """Returns the number of a batch's full blocks when `position` tokens are cached."""
        sealed = total = 0
        for length in self._plan.lengths(batch):
            total += length
            if total > position:
                break
            sealed += 1
        return sealed
