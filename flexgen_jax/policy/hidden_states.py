"""The hidden states between layers: each batch's memory, from one layer's output to the next one's
input."""

from __future__ import annotations

from flexgen_jax.policy.backend import Backend, Handle
from flexgen_jax.policy.cache_blocks import PENDING_WRITES
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.plan import HiddenPart


class HiddenStates:
    """Keeps and writes hidden states, and reserves their memory. Each batch has one."""

    def __init__(self, backend: Backend, ledger: Ledger) -> None:
        self._backend, self._ledger = backend, ledger
        self._kept: dict[int, tuple[int, HiddenPart]] = {}
        self._on_disk: set[int] = set()
        self._writes: dict[int, tuple[Handle, int]] = {}

    def is_ready(self, token: int, layer: int, batch: int) -> bool:
        """Returns whether what `layer` made of a token can be loaded without waiting for its
        computation."""
        kept = self._kept.get(batch)
        if kept is None or kept[0] != token or kept[1].layer != layer:
            return False
        return kept[1].home != "disk" or batch in self._on_disk

    def put(self, token: int, part: HiddenPart, computed: Handle) -> None:
        """Keeps a step's hidden states; those whose home is the disk wait to be computed."""
        self._forget(part.batch)
        self._ledger.reserve(part.home, part.nbytes)
        self._kept[part.batch] = (token, part)
        self._backend.keep_hidden(part, computed)

    def settle(self, token: int, layer: int, batch: int) -> None:
        """Starts writing a step's hidden states, which are now computed, if the disk is their
        home."""
        version, part = self._kept[batch]
        is_latest = (version, part.layer) == (token, layer)
        if part.home != "disk" or batch in self._on_disk or not is_latest:
            return
        self._ledger.reserve("host", part.nbytes)
        self._writes[batch] = (None, part.nbytes)  # released by `close` if the next line fails
        self._writes[batch] = (self._backend.write_hidden(part), part.nbytes)
        self._on_disk.add(batch)
        while len(self._writes) > PENDING_WRITES:
            self._finish(next(iter(self._writes)))

    def part(self, batch: int) -> HiddenPart:
        """Returns the hidden states of a batch to load.

        If they are still in RAM, because they are needed again so soon, they are not read from
        disk.
        """
        part = self._kept[batch][1]
        is_in_memory = batch not in self._on_disk or batch in self._writes
        return part._replace(layouts=()) if part.layouts and is_in_memory else part

    def _finish(self, batch: int) -> None:
        """Waits for a batch's write and releases the memory that it holds."""
        write, nbytes = self._writes[batch]
        self._backend.wait(write)
        del self._writes[batch]
        self._ledger.release("host", nbytes)

    def _forget(self, batch: int) -> None:
        if batch in self._writes:
            self._finish(batch)
        if batch in self._kept:
            _, part = self._kept.pop(batch)
            self._ledger.release(part.home, part.nbytes)
        self._on_disk.discard(batch)

    def leave(self, batch: int) -> None:
        """Frees what a batch has."""
        self._forget(batch)

    def close(self) -> None:
        """Releases the memory of all hidden states."""
        for _, nbytes in self._writes.values():
            self._ledger.release("host", nbytes)
        for _, part in self._kept.values():
            self._ledger.release(part.home, part.nbytes)
        self._writes.clear()
        self._kept.clear()
