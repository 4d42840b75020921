"""The prefixes that requests of a run share, each computed once as a batch of one row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexgen_jax.offload.batch import Batch
from flexgen_jax.offload.disk.kv_pieces import StoredSequence
from flexgen_jax.policy.shapes import BatchShape
from flexgen_jax.policy.sharing import spans_of
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.admission import Admission
from flexgen_jax.schedule.running import Running

PREFIX_BUCKET = 16
"""Prefixes are padded to a multiple of this, or of an eighth of the power of two below them, so
that few shapes are compiled."""


def padded_prefix(tokens: int) -> int:
    """Returns the columns of a prefix of `tokens` tokens: 512 for 500, 640 for 600."""
    bucket = max(PREFIX_BUCKET, (1 << (tokens.bit_length() - 1)) // 8)
    return -(-tokens // bucket) * bucket


@dataclass(eq=False)
class SharedPrefix:
    """A prefix that requests share.

    parent: the shorter prefix that it extends; running: its batch, None until that enters;
    is_held: whether waiting requests have it.
    """

    ids: tuple[int, ...]
    parent: SharedPrefix | None
    running: Running | None = None
    is_held: bool = False

    @property
    def own_ids(self) -> tuple[int, ...]:
        return self.ids[0 if self.parent is None else len(self.parent.ids) :]

    @property
    def chain(self) -> list[SharedPrefix]:
        """This prefix and the prefixes that it extends, shortest first."""
        return [*(() if self.parent is None else self.parent.chain), self]

    def hold(self, is_held: bool) -> None:
        """Keeps the batch for requests that wait, or does so no longer."""
        if self.running is not None and is_held != self.is_held:
            self.running.users += 1 if is_held else -1
            self.is_held = is_held


OpenStored = Callable[[tuple[int, ...]], StoredSequence | None]
"""Returns a prefix's entry in the KV store, None unless it is complete."""


class Prefixes:
    """The prefixes of a run's requests: those whose batches have entered, and those to come."""

    def __init__(self, admission: Admission, open_stored: OpenStored) -> None:
        self._admission, self._shape = admission, admission.plan.shape
        self._open_stored = open_stored
        self._known: dict[tuple[int, ...], SharedPrefix] = {}
        # The longest prefix of each waiting request, by the request's index.
        self._of: dict[int, SharedPrefix] = {}

    @property
    def known(self) -> Collection[tuple[int, ...]]:
        """The token ids of all prefixes."""
        return self._known

    def fitted(self, request: EncodedRequest) -> EncodedRequest:
        """Returns the request without its prefixes if they do not fit the plan."""
        lengths = np.diff((0, *request.shared))
        is_fit = all(padded_prefix(int(tokens)) <= self._shape.prefix for tokens in lengths)
        return request if is_fit else replace(request, shared=())

    def add(self, request: EncodedRequest) -> None:
        """Takes note of a request that waits."""
        parent: SharedPrefix | None = None
        known_indices = [n for n, ids in enumerate(request.prefixes) if ids in self._known]
        # A known one may go on from others than this request says.
        new_prefixes = request.prefixes[known_indices[-1] if known_indices else 0 :]
        for ids in new_prefixes:
            parent = self._known.setdefault(ids, SharedPrefix(ids, parent))
        if parent is not None:
            self._of[request.index] = parent

    def chain(self, request: EncodedRequest) -> list[SharedPrefix]:
        """Returns the prefixes of a waiting request, the shortest first."""
        longest = self._of.get(request.index)
        return [] if longest is None else longest.chain

    def take(self, requests: Sequence[EncodedRequest]) -> list[list[Running]]:
        """Returns the batches of the prefixes of each request; the requests wait no longer."""
        chains = [self.chain(request) for request in requests]
        for request in requests:
            self._of.pop(request.index, None)
        return [_runnings(chain) for chain in chains]

    @property
    def room(self) -> int:
        """Number of prefixes that may enter in addition to resident ones."""
        num_resident = sum(prefix.running is not None for prefix in self._known.values())
        return self._shape.prefixes * (self._shape.prefix > 0) - num_resident

    def missing(self, requests: Iterable[EncodedRequest]) -> list[SharedPrefix]:
        """Returns the prefixes of requests that have not entered yet, the shortest first."""
        missing: dict[SharedPrefix, None] = {}
        for request in requests:
            chain = self.chain(request)
            missing |= {prefix: None for prefix in chain if prefix.running is None}
        return sorted(missing, key=lambda prefix: len(prefix.ids))

    def enter(
        self, shared: Sequence[SharedPrefix], is_first: bool
    ) -> Iterator[tuple[Running, Batch]]:
        """Yields the batches of prefixes whose parents have entered; stored ones have no steps."""
        ready = [b for b in shared if b.parent is None or b.parent.running is not None]
        batches = [self._batch_of(prefix) for prefix in ready]
        entered = self._admission.enter(
            shapes=[BatchShape(1, batch.prompt_len, gen_len=1) for batch in batches],
            is_first=is_first,
            shared=[spans_of([_runnings(b.chain[:-1])]) for b in ready],
            are_prefixes=True,
        )
        for prefix, running, batch in zip(ready, entered, batches, strict=True):
            prefix.running = running
            prefix.hold(True)
            running.closing.callback(self._forget, prefix)
            if batch.stored is not None:
                running.is_stored = True
                running.left.clear()
                running.closing.callback(batch.stored.close)
        yield from zip(entered, batches, strict=True)

    def hold_for(self, waiting: Iterable[EncodedRequest]) -> None:
        """Keeps the prefixes of waiting requests, and no others."""
        held = {prefix for request in waiting for prefix in self.chain(request)}
        for prefix in list(self._known.values()):
            prefix.hold(prefix in held)
            running = prefix.running
            if running is None or running.users or running.is_going:
                continue
            if running.is_stored:  # the loop, which would end it, has not seen it
                running.close()

    def drop(self, request: EncodedRequest) -> None:
        """Forgets a request that will not enter, or will share nothing."""
        self._of.pop(request.index, None)
        self._clean()

    def close(self) -> None:
        """Closes what was opened and not used."""
        self._of.clear()
        self.hold_for(())

    def _batch_of(self, prefix: SharedPrefix) -> Batch:
        own_ids = prefix.own_ids
        columns = padded_prefix(len(own_ids))
        ids, first = np.zeros((1, columns), np.int32), columns - len(own_ids)
        ids[0, first:] = own_ids
        before = np.array([len(prefix.ids) - len(own_ids)], np.int32)
        stored = self._open_stored(own_ids) if prefix.parent is None else None
        return Batch(ids, np.array([first], np.int32), before=before, stored=stored)

    def _forget(self, prefix: SharedPrefix) -> None:
        prefix.running, prefix.is_held = None, False
        self._clean()

    def _clean(self) -> None:
        """Drops pending prefixes that neither a waiting request nor a resident prefix needs."""
        resident = [b for b in self._known.values() if b.running is not None]
        needed = {b for longest in (*self._of.values(), *resident) for b in longest.chain}
        self._known = {ids: b for ids, b in self._known.items() if b in needed}


def _runnings(chain: Iterable[SharedPrefix]) -> list[Running]:
    return [prefix.running for prefix in chain if prefix.running is not None]
