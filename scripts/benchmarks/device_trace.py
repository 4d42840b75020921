"""What a GPU did when, from a trace of `jax.profiler`: its own times of copies and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

COPIES = {"MemcpyH2D": "host_to_device", "MemcpyD2H": "device_to_host"}
"""Names that CUPTI gives to copies, which the trace keeps."""

Span = tuple[float, float]
"""Start and end, in seconds."""


def spans(planes: Iterable[Any]) -> dict[str, list[Span]]:
    """Returns the copies by link and the kernels ("compute") of the first GPU, from the planes of a
    `jax.profiler.ProfileData`. Copies within the device are kernels here."""
    found: dict[str, list[Span]] = {}
    for plane in planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # other lines sum these up by operation
                continue
            for event in line.events:
                start = event.start_ns / 1e9
                kind = COPIES.get(event.name, "compute")
                found.setdefault(kind, []).append((start, start + event.duration_ns / 1e9))
    return found


def united(parts: Iterable[Span]) -> list[Span]:
    """Returns spans that cover the same time and do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(parts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def seconds(parts: Iterable[Span]) -> float:
    """Returns the seconds covered by at least one span."""
    return sum(end - start for start, end in united(parts))


def seconds_together(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Returns the seconds during which spans of both kinds go on."""
    return sum(_common(united(first), united(second)))


def _common(first: list[Span], second: list[Span]) -> Iterator[float]:
    index = 0
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        at = index
        while at < len(second) and second[at][0] < end:
            yield min(end, second[at][1]) - max(start, second[at][0])
            at += 1


def read(folder: Path) -> dict[str, list[Span]]:
    """Returns the spans of the trace in a folder that `jax.profiler.trace` has written."""
    from jax.profiler import ProfileData

    files = sorted(folder.rglob("*.xplane.pb"))
    return spans(ProfileData.from_file(str(files[-1])).planes) if files else {}
