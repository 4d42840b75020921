"""The simulator's stand-in for a machine: a clock over links and processors. Times are in seconds
since the start."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flexgen_jax.policy.hardware import TRANSFERS, HardwareProfile, Rate

RESOURCES = (*TRANSFERS, "compute", "host_compute")


@dataclass(eq=False, slots=True)
class Loading:
    """A load in flight.

    read: the queue entry of its disk read, see `Clock.read`; copied: bytes to copy to the device;
    size: bytes of one operation, which decide the rate, or None for those of the whole load;
    passes_by: whether its copy is small and does not wait for large ones; ready: the time when it
    can be copied; after its copy is queued, the time when it is on the device.
    """

    read: list[float] | None = None
    copied: int = 0
    size: float | None = None
    passes_by: bool = False
    ready: float = 0.0


class Clock:
    """Time as the executor's thread sees it: its dependencies, and its resources."""

    def __init__(self, hw: HardwareProfile, overlap: bool, unified: bool) -> None:
        self.now = 0.0
        self._hw, self._unified = hw, unified
        self._overlap = overlap
        self.is_prefill = True  # which decides how much transfers and computing disturb each other
        self._device = self._lost = 0.0
        self._links = {"host_to_device": 0.0, "device_to_host": 0.0, "disk_write": 0.0}
        self._lanes: tuple[deque[list[float]], ...] = (deque(), deque())
        self._disk = 0.0
        self.weight = 1.0  # number of passes that the current one stands for
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self.bytes = dict.fromkeys(TRANSFERS, 0.0)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def compute(self, seconds: float, ready: float = 0.0) -> float:
        """Dispatches a program that takes `seconds`; returns its finish time.

        It also takes the seconds that transfers' drag has cost since the last program.
        """
        seconds += self._lost
        self._lost = 0.0
        self._device = max(self._device, self.now, ready) + seconds
        self.busy["compute"] += seconds * self.weight
        return self._device

    def guess(self, seconds: float) -> None:
        """Drafts tokens on the device, after its current work, while the thread waits."""
        if seconds:
            self.wait(self.compute(seconds))

    def host_compute(self, seconds: float, ready: float) -> None:
        """Attends on the CPU from the time `ready` on, while the thread waits."""
        if self._unified:
            ready = max(ready, self._device)
        self.now = max(self.now, ready) + seconds
        if self._unified:
            self._device = self.now
        self.busy["host_compute"] += seconds * self.weight

    def move(self, link: str, nbytes: int, ready: float = 0.0, size: float | None = None) -> float:
        """Queues a transfer on a link other than "disk_read"; returns its finish time.

        size: bytes of one operation, which decide the rate (default: `nbytes`).
        """
        if nbytes == 0 or (self._unified and link != "disk_write"):
            return max(self.now, ready)
        rate: Rate = getattr(self._hw, link)
        seconds = self._count(link, nbytes, rate.seconds(nbytes, size))
        self._links[link] = max(self._links[link], self.now, ready) + seconds
        return self._links[link]

    def pass_by(self, link: str, nbytes: int, ready: float = 0.0) -> float:
        """Makes a small transfer; returns its finish time.

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

        seconds: how long it takes if nothing else is read. Returns the queue's entry: remaining
        seconds, and the finish time, -1 before the end.
        """
        seconds = self._count("disk_read", nbytes, seconds, source)
        self._drain(self.now)
        entry = [seconds, -1.0]
        self._lanes[urgent].append(entry)
        return entry

    def _count(self, link: str, nbytes: int, seconds: float, source: str = "") -> float:
        if self._overlap:
            drag, slowed = self._hw.contention(source or link, self.is_prefill)
            self._lost += drag * seconds
            seconds *= slowed
        self.bytes[link] += nbytes * self.weight
        self.busy[link] += seconds * self.weight
        return seconds

    def read_done(self, entry: list[float] | None) -> bool:
        if entry is None:
            return True
        self._drain(self.now)
        return entry[1] >= 0

    def finish_read(self, entry: list[float] | None) -> None:
        """Waits for the read of a queue entry."""
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
