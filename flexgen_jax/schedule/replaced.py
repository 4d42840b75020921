"""What batches replace with every token: hidden states between layers, and recurrent states.

Each lies in a `ReplacedSlot`, from the step that makes it until the next such step.
"""

from __future__ import annotations

from flexgen_jax.schedule.backend import Backend
from flexgen_jax.schedule.cache_blocks import PENDING_WRITES
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.passes import Handle
from flexgen_jax.schedule.running import ReplacedPart, ReplacedSlot, Running


class ReplacedArrays:
    """Stores and writes the contents of slots, and reserves their memory."""

    def __init__(self, backend: Backend, ledger: Ledger) -> None:
        self._backend, self._ledger = backend, ledger
        self._writing: dict[ReplacedSlot, None] = {}

    def enter(self, running: Running) -> None:
        """Admits a batch; its slots are freed when it closes."""
        running.closing.callback(self._empty, running.hidden)
        for state in running.layers:
            if state.layer.replaced:
                running.closing.callback(self._empty, state.slot)

    def is_ready(self, slot: ReplacedSlot, token: int, layer: int) -> bool:
        """Returns whether `layer`'s result for a token can be loaded without waiting for
        compute."""
        part = slot.part
        if part is None or slot.token != token or part.layer != layer:
            return False
        return part.home != "disk" or slot.is_on_disk

    def put(self, token: int, part: ReplacedPart, computed: Handle) -> None:
        """Stores a step's result; a result for disk waits until it is computed."""
        slot = part.slot
        self._forget(slot)
        self._ledger.reserve(part.home, part.nbytes)
        slot.part, slot.token = part, token
        self._backend.keep(part, computed)

    def settle(self, slot: ReplacedSlot, token: int, layer: int) -> None:
        """Starts writing a step's computed result if its home is the disk."""
        part = slot.part
        assert part is not None, "the step has made something"
        is_latest = (slot.token, part.layer) == (token, layer)
        if part.home != "disk" or slot.is_on_disk or not is_latest:
            return
        self._ledger.reserve("host", part.nbytes)
        self._writing[slot] = None  # released by `_empty` if the next line fails
        slot.write = self._backend.write(part)
        slot.is_on_disk = True
        while len(self._writing) > PENDING_WRITES:
            self._finish(next(iter(self._writing)))

    def part(self, slot: ReplacedSlot) -> ReplacedPart:
        """Returns a slot's content for loading.

        If it is still in RAM, because it is needed again so soon, it is not read from disk.
        """
        part = slot.part
        assert part is not None, "a step has made something"
        is_in_memory = not slot.is_on_disk or slot in self._writing
        return part._replace(layouts=()) if part.layouts and is_in_memory else part

    def _finish(self, slot: ReplacedSlot) -> None:
        """Waits for a slot's write and releases the memory that it holds."""
        assert slot.part is not None, "it is being written"
        self._backend.wait(slot.write)
        del self._writing[slot]
        self._ledger.release("host", slot.part.nbytes)

    def _forget(self, slot: ReplacedSlot) -> None:
        if slot in self._writing:
            self._finish(slot)
        if slot.part is not None:
            self._ledger.release(slot.part.home, slot.part.nbytes)
        slot.part, slot.is_on_disk = None, False

    def _empty(self, slot: ReplacedSlot) -> None:
        """Releases the memory of a slot whose batch ends, also if its write failed."""
        part, slot.part = slot.part, None
        if part is None:
            return
        self._ledger.release(part.home, part.nbytes)
        if slot in self._writing:
            del self._writing[slot]
            self._ledger.release("host", part.nbytes)
