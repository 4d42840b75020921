"""Which rows of a batch share which prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")
"""A prefix: a `Running`."""


class Shared(NamedTuple, Generic[P]):
    """A prefix, and the rows of a batch that share it: from `start` to before `stop`."""

    prefix: P
    start: int
    stop: int


def spans_of(rows: Sequence[Sequence[P]]) -> tuple[Shared[P], ...]:
    """Returns what consecutive rows share. rows: the prefixes of each row, in their order.

    If two rows begin with prefix a, and row 1 continues with b, then a is shared by rows 0 to 1,
    and b belongs to row 1.
    """
    spans: list[Shared[P]] = []
    going: list[Shared[P]] = []
    for row, prefixes in enumerate(rows):
        covered = 0
        while (
            covered < min(len(going), len(prefixes)) and going[covered].prefix is prefixes[covered]
        ):
            covered += 1
        spans += going[covered:]
        going = [*going[:covered], *(Shared(prefix, row, row + 1) for prefix in prefixes[covered:])]
        going = [span._replace(stop=row + 1) for span in going]
    return tuple(sorted([*spans, *going], key=lambda span: (span.start, -span.stop)))
