"""Measurements of a run: bytes over each link, and the busy time of each resource."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flexgen_jax.offload.trace import Trace

Link = Literal["disk_read", "disk_write", "host_to_device", "device_to_host"]
Resource = Literal[
    "disk_read", "disk_write", "host_to_device", "device_to_host", "compute", "host_compute"
]
Content = Literal["weights", "cache", "activations", "layers", "attention"]
"""Kinds of data that are moved, or of work that is computed."""
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
LINKS: tuple[Link, ...] = get_args(Link)
RESOURCES: tuple[Resource, ...] = get_args(Resource)
ALWAYS_TIMED: tuple[Resource, ...] = ("disk_read", "disk_write", "host_compute")
"""Resources whose busy time costs nothing to measure; see `Metrics`."""


@dataclass(eq=False, slots=True)
class Operation:
    """One operation of a resource, with its content and the phase of its request.

    what: for people, e.g. "weights of decoder layer 3"; start: when it began, in seconds by
    `time.perf_counter`; run: the number of the run that it belongs to.
    """

    resource: Resource
    content: Content
    what: str
    nbytes: int
    phase: Phase
    start: float
    run: int


@dataclass
class _Busy:
    """Bytes moved, and the seconds during which at least one operation was under way."""

    nbytes: int = 0
    seconds: float = 0.0
    active: int = 0
    since: float = 0.0

    def begin(self, now: float) -> None:
        if self.active == 0:
            self.since = now
        self.active += 1

    def end(self, now: float) -> None:
        self.active -= 1
        if self.active == 0:
            self.seconds += now - self.since


class Metrics:
    """Counters of one run, safe to use from the threads on which transfers complete.

    is_timed: whether a `Watcher` measures the busy time of the device and of its links; so it is
    with a trace. Bytes, and the time of `ALWAYS_TIMED`, are always counted.
    """

    def __init__(self, trace: Trace | None = None, is_timed: bool = False) -> None:
        self._lock = threading.Lock()
        self._trace = trace
        self.is_timed = is_timed or trace is not None
        self._run = 0
        self.reset()

    def reset(self) -> None:
        """Begins a new run; operations begun earlier are not counted in it."""
        with self._lock:
            self._run += 1
            self._phase: Phase = "prefill"
            self._whole: dict[Resource, _Busy] = {name: _Busy() for name in RESOURCES}
            self._parts: dict[tuple[Phase, Resource, Content], _Busy] = defaultdict(_Busy)
            self._any: dict[Phase, _Busy] = {phase: _Busy() for phase in PHASES}

    def queue(self, resource: Resource, content: Content, name: str, nbytes: int = 0) -> Operation:
        """Records that a resource was asked for one more operation, which moves `nbytes` bytes."""
        with self._lock:
            operation = Operation(resource, content, name, nbytes, self._phase, 0.0, self._run)
            for busy in self._counters(operation):
                busy.nbytes += nbytes
        return operation

    def start(self, operation: Operation) -> None:
        """Records that a resource starts an operation from its queue."""
        operation.start = time.perf_counter()
        with self._lock:
            if operation.run == self._run:
                for busy in self._counters(operation):
                    busy.begin(operation.start)

    def begin(self, resource: Resource, content: Content, name: str, nbytes: int = 0) -> Operation:
        """Records that a resource starts one more operation at once."""
        operation = self.queue(resource, content, name, nbytes)
        self.start(operation)
        return operation

    @contextmanager
    def timing(self, resource: Resource, content: Content, name: str) -> Iterator[None]:
        """Counts a resource as busy with one more operation within the context."""
        operation = self.begin(resource, content, name)
        try:
            yield
        finally:
            self.end(operation)

    def end(self, operation: Operation) -> None:
        """Records that a resource finished one of its operations."""
        now = time.perf_counter()
        with self._lock:
            if operation.run != self._run:
                return
            for busy in self._counters(operation):
                busy.end(now)
        if self._trace is not None:
            track = f"{operation.resource}: {operation.content}".replace("_", " ")
            details = {"phase": operation.phase, "bytes": operation.nbytes}
            self._trace.span(track, operation.what, operation.start, now, **details)

    def _counters(self, operation: Operation) -> tuple[_Busy, _Busy, _Busy]:
        key = (operation.phase, operation.resource, operation.content)
        whole, part_counter = self._whole[operation.resource], self._parts[key]
        return whole, part_counter, self._any[operation.phase]

    def enter(self, phase: Phase) -> None:
        """Assigns operations that begin from now on to this phase."""
        with self._lock:
            self._phase = phase

    def report(self) -> dict[str, Any]:
        """Returns the run's counters as a dict.

        "bytes": bytes by link; "decode_bytes": bytes by link of transfers that were asked for while
        decoding; "busy_s": seconds with an active operation, by timed resource; "breakdown": a row
        with phase, resource, content, bytes and busy_s for each used combination; phase is the
        phase of the request, and busy_s is None if it was not timed; "any_busy_s": seconds with any
        active operation, by phase; None if not all resources are timed.

        A copy between host and device is active from the time when its source is ready and the
        previous copy is done, until its result is ready. On a GPU that is more than the link was
        busy: a copy waits for computations enqueued before its memory was allocated, and several
        copies run at once. The link's own time is in a trace of `jax.profiler`
        (`scripts/benchmarks/gpu_measure.py`).
        """
        timed = RESOURCES if self.is_timed else ALWAYS_TIMED
        with self._lock:
            decoded = dict.fromkeys(LINKS, 0)
            rows: list[dict[str, Any]] = []
            for (phase, resource, content), busy in sorted(self._parts.items()):
                if phase == "decode" and resource in LINKS:
                    decoded[resource] += busy.nbytes
                row = {"phase": phase, "resource": resource, "content": content}
                seconds = busy.seconds if resource in timed else None
                rows.append({**row, "bytes": busy.nbytes, "busy_s": seconds})
            return {
                "bytes": {link: self._whole[link].nbytes for link in LINKS},
                "decode_bytes": decoded,
                "busy_s": {name: self._whole[name].seconds for name in timed},
                "breakdown": rows,
                "any_busy_s": {
                    phase: busy.seconds if self.is_timed else None
                    for phase, busy in self._any.items()
                },
            }
