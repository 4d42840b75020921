"""Segments of a batch: neighbouring rows whose padding is left out while prompts are computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

MOST = 8
"""Segments of a batch at most, a power of two; each is compiled for itself."""

STEP = 16
"""Tokens that are left out are a multiple of this."""


class Segment(NamedTuple):
    """Some rows of a batch, in their order, and how many of their first tokens, which are padding
    in all of them, are left out."""

    rows: int
    skipped: int


def segments_of(padding: Sequence[int], worth: int, together: int = 1) -> tuple[Segment, ...]:
    """Divides a batch into segments; () if that leaves out nothing that is worth it.

    padding: tokens of padding before each row's prompt; worth: how many of them, of all rows, each
    of several segments must leave out to be worth compiling, since other batches have other ones;
    together: how many rows are computed at a time, of which segments are made as far as that goes.
    """

    def gain(segments: Sequence[Segment]) -> int:
        return left_out(segments) - worth * len(segments) * (len(segments) > 1)

    choices = [_divided(padding, 1 << n, together) for n in range(MOST.bit_length())]
    best = max(choices, key=gain)
    return best if left_out(best) else ()


def left_out(segments: Sequence[Segment]) -> int:
    """Returns how many tokens of padding segments leave out."""
    return sum(segment.rows * segment.skipped for segment in segments)


def _divided(padding: Sequence[int], count: int, together: int) -> tuple[Segment, ...]:
    """Divides rows into about `count` equal parts; joins neighbours that leave out as much."""
    rows = -(-len(padding) // count)
    rows = -(-rows // together) * together
    parts = [padding[start : start + rows] for start in range(0, len(padding), rows)]
    segments = [Segment(len(part), min(part) // STEP * STEP) for part in parts]
    return tuple(
        Segment(sum(segment.rows for segment in alike), skipped)
        for skipped, alike in groupby(segments, key=lambda segment: segment.skipped)
    )
