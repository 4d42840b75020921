"""Schedules: when batches may enter a run; see `waves.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A rule that says when batches may enter, and what follows from it.

    waits: batches enter when all others have had their last step; a_wave: how many may enter in one
        wave, None for any number.
    """

    name: str
    waits: bool
    a_wave: int | None = None

    @property
    def shares_weights(self) -> bool:
        """Whether a layer's weights move once for several consecutive batches; else once for each
        batch."""
        return not (self.waits and self.a_wave == 1)


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("continuous", waits=False),
        Schedule("zigzag", waits=True),
        Schedule("row", waits=True, a_wave=1),
        Schedule("diagonal", waits=False, a_wave=1),
    )
}
