"""How much of each tier may be in use, by trees and by streams of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flexgen_jax.errors import UserError
from flexgen_jax.offloading.stream_memory import StreamMemory
from flexgen_jax.policy.policy import Tier


class Room:
    """The limits of the tiers, and the memory that streams use.

    limits: bytes, None for no limit; used: returns the bytes of all trees; idle: the memory of the
    last stream, for the next stream; it is freed if its room is needed.
    """

    def __init__(
        self, limits: Mapping[Tier, int | None], used: Callable[[], Mapping[Tier, int]]
    ) -> None:
        self._limits, self._used = limits, used
        self._streams: dict[int, Mapping[Tier, int]] = {}
        self.idle: StreamMemory | None = None

    def check(self, wanted: Mapping[Tier, int], what: str) -> None:
        """Raises `UserError` if a tier has no room for the requested bytes."""
        for tier, nbytes in wanted.items():
            limit, used = self._limits[tier], self._used()[tier]
            used += sum(stream[tier] for stream in self._streams.values())
            if limit is None:
                continue
            if tier == "host" and self.idle and used + nbytes + self.idle.nbytes > limit:
                self.idle = None
            if used + nbytes > limit:
                name = "disk_space" if tier == "disk" else f"{tier}_memory"
                raise UserError(
                    f"{what} needs {nbytes} bytes of {tier} memory in addition to {used} in use, "
                    f"but {name} allows {limit}: raise it, place more in a slower tier, or lower "
                    "`ahead`"
                )

    def begin(self, memory: StreamMemory, needed: Mapping[Tier, int]) -> None:
        """Counts a stream's memory."""
        self._streams[id(memory)] = needed

    def end(self, memory: StreamMemory) -> None:
        """Counts it no more; the next stream may use its memory."""
        del self._streams[id(memory)]
        self.idle = memory
