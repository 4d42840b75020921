"""Batches shrink: rows that are finished leave their batches, which then have fewer rows."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen_jax.policy.policy import Tier
from flexgen_jax.schedule.backend import Backend
from flexgen_jax.schedule.cache_blocks import CacheBlocks
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.passes import Handle
from flexgen_jax.schedule.prefetch import Prefetch, state_of
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.waves import Step

ROWS_OF_A_LARGE_BATCH = 64
"""Above this, a batch shrinks in smaller steps."""

ENTRY_FRACTION = 4
"""New batches enter a run when rows for this fraction of a batch are free."""


class Shrinking:
    """Leaves batches with fewer rows.

    peaks: the bytes by tier that were planned, within which that must be possible; None for no
    limit.
    """

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        cache: CacheBlocks,
        prefetch: Prefetch,
        last_decoder: int,
        peaks: Mapping[Tier, int] | None,
    ) -> None:
        self._backend, self._ledger, self._cache = backend, ledger, cache
        self._prefetch, self._last_decoder, self._peaks = prefetch, last_decoder, peaks

    def wish(self, step: Step, following: Step, unfinished: int, last_token: int) -> None:
        """Shrinks a batch to few more than its unfinished rows, from its next token on, or one
        token later if that has begun."""
        running, rows = step.batch, fewer_rows(unfinished)
        token = step.token + 1 + (following.batch is running)
        if rows < running.rows and token <= last_token and self._fits(running):
            running.shrinking = token, rows
            self._prefetch.forget(running, 0, token)

    def _fits(self, running: Running) -> bool:
        """Returns whether the temporary memory for shrinking a batch fits."""
        if self._peaks is None:
            return True
        in_use, needed = self._ledger.used, self._cache.bytes_to_shrink(running)
        return all(in_use[tier] + nbytes <= self._peaks[tier] for tier, nbytes in needed.items())

    def shrink(self, step: Step) -> None:
        """Leaves a batch with fewer rows, from a step in the embedding on."""
        running = step.batch
        if running.is_going and running.shrinking is not None:
            _, rows = running.shrinking
            running.shrink(rows)
            self._backend.shrink(step, rows)

    def shrink_state(self, step: Step, cache: Handle, replaced: Handle, number: int) -> None:
        """Reduces a layer's state to its batch's current rows; number: the step's."""
        state = state_of(step)
        self._backend.shrink_state(state, cache, replaced)
        if state.layer.growing:
            self._cache.shrink(state, number)
        if step.layer == self._last_decoder:
            step.batch.shrinking = None


def fewer_rows(rows: int) -> int:
    """Returns the rows that a batch with `rows` unfinished rows may shrink to: one of few numbers,
    since programs are compiled for each, and fewer rows save more in a large batch.

    They are 1, 4, 16, 32, 64, 96, 128, 192, 256, 384, ...
    """
    bits = (rows - 1).bit_length()
    power = 1 << (bits + bits % 2 if bits < 4 else bits)
    is_large = power > ROWS_OF_A_LARGE_BATCH
    return power * 3 // 4 if is_large and rows <= power * 3 // 4 else power


def rows_beside(rows: int) -> int:
    """Returns the rows of a batch that joins a run with `rows` free rows: few shapes are
    worth compiling for."""
    return max(number for number in range(1, rows + 1) if fewer_rows(number) == number)
