"""Segments of a batch: neighbouring rows whose padding is left out while prompts are computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

MAX_SEGMENTS = 8
"""Segments of a batch at most, a power of two; each is compiled separately."""

SEGMENT_TOKENS = 16
"""Tokens that are left out are a multiple of this."""


class Segment(NamedTuple):
    """Consecutive rows of a batch, and the number of their first tokens that are padding in all
    rows and skipped."""

    rows: int
    skipped: int


def segments_of(padding: Sequence[int], worth: int, together: int = 1) -> tuple[Segment, ...]:
    """Divides a batch into segments; () if that leaves out nothing that is worth it.

    padding: tokens of padding before each row's prompt; worth: how many of them, of all rows, each
    of several segments must leave out to be worth compiling, since other batches have other ones;
    together: number of rows computed together; segments are multiples of it where possible.
    """

    def gain(segments: Sequence[Segment]) -> int:
        return left_out(segments) - worth * len(segments) * (len(segments) > 1)

    choices = [_divided(padding, 1 << n, together) for n in range(MAX_SEGMENTS.bit_length())]
    best = max(choices, key=gain)
    return best if left_out(best) else ()


def left_out(segments: Sequence[Segment]) -> int:
    """Returns how many tokens of padding segments leave out."""
    return sum(segment.rows * segment.skipped for segment in segments)


def _divided(padding: Sequence[int], count: int, together: int) -> tuple[Segment, ...]:
    """Divides rows into about `count` equal parts; joins neighbours that skip the same number of
    tokens."""
    rows = -(-len(padding) // count)
    rows = -(-rows // together) * together
    groups = [padding[start : start + rows] for start in range(0, len(padding), rows)]
    segments = [
        Segment(len(group), min(group) // SEGMENT_TOKENS * SEGMENT_TOKENS) for group in groups
    ]
    return tuple(
        Segment(sum(segment.rows for segment in alike), skipped)
        for skipped, alike in groupby(segments, key=lambda segment: segment.skipped)
    )
