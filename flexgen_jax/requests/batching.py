"""Forms batches of requests that wait, and lets them enter a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flexgen_jax.offload.batch import Batch, Guesses
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.segments import left_out
from flexgen_jax.policy.shapes import BatchShape
from flexgen_jax.policy.sharing import spans_of
from flexgen_jax.requests.collector import Collector
from flexgen_jax.requests.feed import Source
from flexgen_jax.requests.prefix_sharing import nothing_stored, share
from flexgen_jax.requests.prefixes import OpenStored, Prefixes, SharedPrefix
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.requests.sampling import adjusting_arrays
from flexgen_jax.schedule.admission import Admission
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.shrinking import ENTRY_FRACTION, fewer_rows, rows_beside


class KeptTexts(NamedTuple):
    """Lookup in a KV store: how many of a prompt's first tokens, and these themselves."""

    stored_tokens: Callable[[tuple[int, ...]], int]
    open: OpenStored


NOTHING_KEPT = KeptTexts(nothing_stored, lambda ids: None)

ENTRY_WAVES = 2
"""For how many waves, times the number of batches that are going, few requests wait for others to
enter with them, where rows are free."""

PATIENCE = 16
"""Number of times that a stream's request lets requests with resident prefixes pass, before it
enters itself."""


def grouped(requests: Sequence[EncodedRequest], batch_size: int) -> list[Sequence[EncodedRequest]]:
    """Spreads requests evenly over as few batches as hold them, in their order."""
    if not requests:
        return []
    size = -(-len(requests) // -(-len(requests) // batch_size))
    return [requests[i : i + size] for i in range(0, len(requests), size)]


class PromptTokens(NamedTuple):
    """The tokens of a run's prompts: those computed, with the padding that fills up batches, those
    that were not computed because others share them, and those loaded from a KV store."""

    computed: int
    padded: int
    shared: int
    stored: int


class Waiting:
    """Requests that wait for their batches to enter: the source of a run.

    Those that share a prefix go together, and those of similar length. members: the requests of
    admitted batches; left: requests that are longer than what was planned for; entered: how many
    were taken.
    """

    def __init__(
        self,
        plan: BlockPlan,
        source: Source[EncodedRequest],
        collector: Collector,
        shares: bool = False,
        earlier_texts: KeptTexts = NOTHING_KEPT,
    ) -> None:
        """shares: whether later requests may share prefixes; earlier_texts: lookup in a KV
        store."""
        self._plan, self._source, self._collector = plan, source, collector
        self._requests: list[EncodedRequest] = []
        self._admission = Admission(plan)
        self._prefixes = Prefixes(self._admission, earlier_texts.open)
        self._kept = earlier_texts
        self._given: dict[Running, Batch] = {}
        self.members: dict[Running, Sequence[EncodedRequest]] = {}
        # The prefixes of the rows of each batch.
        self._chains: dict[Running, list[list[Running]]] = {}
        # Those that enter next, once their prefixes are computed.
        self._next_ones: Sequence[EncodedRequest] = ()
        self.left: list[EncodedRequest] = []
        self.entered = self._computed = self._padded = self._spared = self._loaded = 0
        self._shares = shares
        # How often other requests passed the longest waiting one, and how often in a row
        # nothing could enter though nothing was going.
        self._passed_over = self._stuck = 0
        # For how many waves few requests have waited for others.
        self._waves_waited = 0

    @property
    def prompts(self) -> PromptTokens:
        """The tokens of all prompts that have entered."""
        return PromptTokens(self._computed, self._padded, self._spared, self._loaded)

    def given(self, running: Running) -> Batch:
        """Return the computed parts of an admitted batch."""
        return self._given[running]

    def enter(self, going: Sequence[Running], max_batches: int | None) -> Sequence[Running]:
        """Admits batches while the plan has rows in addition to those of `going`, after their
        prefixes."""
        if any(running.is_prefix for running in going):
            return ()
        policy = self._plan.policy
        free = policy.batch_size * policy.num_batches - sum(running.rows for running in going)
        if free < (policy.batch_size // ENTRY_FRACTION if going else 1):
            return ()
        if not self.left:  # they wait for a run of their own
            self._top_up(max(0, free - len(self._requests)))
        self._drop_unwanted()
        if self._waits_for_more(going):
            return ()
        if not self._next_ones:
            number = min(free, policy.batch_size * (max_batches or policy.num_batches))
            self._next_ones = self._chosen(number, is_beside=bool(going))
        while missing := self._prefixes.missing(self._next_ones):
            entered = self._enter_prefixes(missing, is_first=not going)
            if entered:
                return entered
        members, self._next_ones = self._next_ones, ()
        return self._enter_batches(grouped(members, policy.batch_size), is_first=not going)

    def _waits_for_more(self, going: Sequence[Running]) -> bool:
        """Returns whether a stream's few requests wait for others to enter with them.

        Each batch is computed by itself, so many small batches take longer than a few large ones.
        Where weights are loaded, all batches share the loads, and no request waits.
        """
        rows = sum(running.rows for running in going)
        is_few = len(self._requests) < -(-rows // ENTRY_FRACTION)
        can_wait = not self._source.is_ended and self._plan.is_resident and not self._next_ones
        self._waves_waited += bool(self._requests)
        if is_few and can_wait and self._waves_waited <= ENTRY_WAVES * len(going):
            return True
        self._waves_waited = 0
        return False

    def _drop_unwanted(self) -> None:
        """Leaves out requests that are not to be run any more."""
        before = {r.index: r for r in (*self._requests, *self._next_ones)}
        self._requests = self._collector.wanted(self._requests)
        self._next_ones = self._collector.wanted([*self._next_ones])
        waiting_indices = {r.index for r in (*self._requests, *self._next_ones)}
        for request in [r for index, r in before.items() if index not in waiting_indices]:
            self._prefixes.drop(request)
        if len(waiting_indices) < len(before):
            self._prefixes.hold_for([*self._requests, *self._next_ones])

    def _enter_batches(
        self, groups: Sequence[Sequence[EncodedRequest]], is_first: bool
    ) -> Sequence[Running]:
        """Lets batches of some requests enter."""
        if not groups:
            return ()
        rows = len(groups[0])
        if not self._source.is_ended:  # a stream, whose requests come in any number
            rows = min(fewer_rows(rows), self._plan.policy.batch_size)
        config = self._plan.config
        batches = [self._collector.batch(config, group, rows) for group in groups]
        shapes = [
            BatchShape(
                rows=batch.size,
                prompt_len=batch.prompt_len,
                gen_len=max(request.max_tokens for request in group),
                scores_prompt=batch.needs_prompt,
            )
            for batch, group in zip(batches, groups, strict=True)
        ]
        chains = [self._prefixes.take(group) for group in groups]
        entered = self._admission.enter(
            shapes=shapes, is_first=is_first, shared=[spans_of(chain) for chain in chains]
        )
        self._prefixes.hold_for(self._requests)
        for running, batch, group, chain in zip(entered, batches, groups, chains, strict=True):
            self._chains[running] = chain
            self._take_in(running, batch, group)
            self._count(running, batch, sum(len(request.own_ids) for request in group))
            self._spared += sum(request.prefix_len for request in group)
        self.entered += sum(map(len, groups))
        return entered

    def _enter_prefixes(self, missing: Sequence[SharedPrefix], is_first: bool) -> Sequence[Running]:
        """Lets the prefixes of requests enter; returns those that have to be computed."""
        entered = []
        for running, batch in self._prefixes.enter(missing, is_first):
            self._take_in(running, batch, ())
            tokens = batch.prompt_len - int(batch.first_valid[0])
            self._spared -= tokens
            if running.is_stored:
                self._loaded += tokens
            else:
                self._count(running, batch, tokens)
                entered.append(running)
        return entered

    def _take_in(self, running: Running, batch: Batch, members: Sequence[EncodedRequest]) -> None:
        self._given[running], self.members[running] = batch, members
        running.closing.callback(self._forget, running)

    def _count(self, running: Running, batch: Batch, tokens: int) -> None:
        """Counts the prompts' tokens of a batch that enters, and those with its padding."""
        segments = self._plan.segments(running.shape, batch.padding)
        self._computed += tokens
        self._padded += batch.size * batch.prompt_len - left_out(segments)

    def _forget(self, running: Running) -> None:
        """Forgets a finished batch."""
        del self._given[running], self.members[running]
        self._chains.pop(running, None)

    def _top_up(self, max_requests: int) -> None:
        """Takes requests that have come; the shortest prompts are first."""
        new_requests = self._source.take(max_requests)
        if not new_requests:
            return
        if self._shares and self._plan.shape.prefix:
            new_requests = share(new_requests, self._prefixes.known, self._kept.stored_tokens)
        for request in map(self._prefixes.fitted, new_requests):
            if self._fits(request):
                self._prefixes.add(request)
                self._requests.append(request)
            else:
                self.left.append(request)
        self._requests = _in_order(self._requests, self._prefixes)
        self._prefixes.hold_for([*self._requests, *self._next_ones])

    def _fits(self, request: EncodedRequest) -> bool:
        """Returns whether a request is no longer than what was planned for."""
        shape, head = self._plan.shape, self._collector.head_of([request])
        return (
            len(request.own_ids) <= max(shape.prompt_lens)
            and request.max_tokens <= shape.gen_len
            and head.logit_copies <= shape.head.logit_copies
        )

    def _chosen(self, max_requests: int, is_beside: bool) -> Sequence[EncodedRequest]:
        """Takes up to `max_requests` requests out, neighbours in length; is_beside: whether they
        run together with other batches."""
        number = min(max_requests, len(self._requests))
        if is_beside and number:
            number = rows_beside(number)
        first = 0
        if number < len(self._requests) and not self._source.is_ended:
            # The longest waiting request goes, regardless of its length.
            oldest = min(range(len(self._requests)), key=lambda i: self._requests[i].index)
            first = min(oldest, len(self._requests) - number)
        fitting = self._with_room(self._requests[first : first + number], is_beside)
        fitting_ids = set(map(id, fitting))
        self._requests = [request for request in self._requests if id(request) not in fitting_ids]
        return fitting

    def _with_room(
        self, requests: Sequence[EncodedRequest], is_beside: bool
    ) -> Sequence[EncodedRequest]:
        """Returns the leading requests whose prefixes fit the plan; if
        there is none, others whose prefixes have entered."""
        room, count = self._prefixes.room, 0
        new_prefixes = set[SharedPrefix]()
        for request in requests:
            new_prefixes.update(self._prefixes.missing([request]))
            if len(new_prefixes) > room:
                break
            count += 1
        if count or not requests:
            self._passed_over = self._stuck = 0
            return requests[:count]
        resident_requests = [r for r in self._requests if not self._prefixes.missing([r])]
        self._passed_over += not self._source.is_ended
        self._stuck = 0 if resident_requests or is_beside else self._stuck + 1
        if max(self._passed_over, self._stuck) > PATIENCE:
            return self._by_itself(requests[0])
        return resident_requests[: len(requests)]

    def _by_itself(self, request: EncodedRequest) -> Sequence[EncodedRequest]:
        """Removes a request's prefixes if they do not fit; returns it unless it is then
        too long for the plan."""
        self._passed_over = self._stuck = 0
        self._prefixes.drop(request)
        self._requests.remove(request)
        alone = replace(request, shared=(), is_alone=True)
        if self._fits(alone):
            return [alone]
        self.left.append(alone)
        return ()

    def keep(self, running: Running, rows: Sequence[int]) -> None:
        """Leaves a batch with these rows; rows beyond the requests are padding, and come last."""
        self._given[running] = self._given[running].taken(rows)
        members, chains = self.members[running], self._chains[running]
        kept_rows = [row for row in rows if row < len(members)]
        self.members[running] = [members[row] for row in kept_rows]
        self._chains[running] = [chains[row] for row in kept_rows]
        running.share(spans_of(self._chains[running]))

    def adjusted(self, running: Running, guesses: Guesses = ()) -> tuple[np.ndarray, ...]:
        """Returns the arguments of `layers.sampling.adjust` for a batch's next tokens, or (); see
        `offload.batch.BatchSource`."""
        members, collector = self.members[running], self._collector
        if not any(r.params.is_adjusted for r in members):
            return ()
        member_drafts = zip(members, _of_each(members, guesses), strict=True)
        rows = [
            changes for r, drafts in member_drafts for changes in collector.adjustments(r, drafts)
        ]
        padding: list[Mapping[int, tuple[float, float]]] = [{}] * (
            self._given[running].size - len(members)
        )
        return adjusting_arrays([*rows, *padding])

    def allowed(self, running: Running, guesses: Guesses = ()) -> np.ndarray | None:
        """Returns the allowed next tokens of a batch, uint32 [batch, vocabulary / 32], or None;
        see `offload.batch.BatchSource`."""
        members, collector = self.members[running], self._collector
        if all(r.params.schema is None for r in members):
            return None
        guessed = _of_each(members, guesses)
        allowed_tokens = [
            collector.allowed(r, drafts) for r, drafts in zip(members, guessed, strict=True)
        ]
        words = next((masks[0].size for masks in allowed_tokens if masks is not None), None)
        if words is None:
            return None
        rows = self._given[running].size + sum(map(len, guessed))
        allowed, row = np.full((rows, words), ~np.uint32(0)), 0
        for masks, drafts in zip(allowed_tokens, guessed, strict=True):
            if masks is not None:
                allowed[row : row + len(masks)] = masks
            row += 1 + len(drafts)
        return allowed

    def wait(self) -> bool:
        """Waits until a request has come; returns false if none will that was planned for."""
        if self._requests or self._next_ones:
            return True
        return not self.left and self._source.wait()

    def close(self) -> None:
        """Closes batches that entered and had no step, and what was opened for others."""
        for running in reversed([*self._given]):
            running.close()
        self._prefixes.close()

    def unfinished(self) -> list[EncodedRequest]:
        """Returns the requests that have not entered."""
        return [*self._next_ones, *self._requests, *self.left]


def _of_each(members: Sequence[EncodedRequest], guesses: Guesses) -> list[Sequence[int]]:
    """Returns the guesses of each request of a batch, without those of rows that fill it up."""
    return [guesses[row] if guesses else () for row in range(len(members))]


def _in_order(requests: Sequence[EncodedRequest], prefixes: Prefixes) -> list[EncodedRequest]:
    """Returns requests by length, with those together that share a prefix."""
    roots = {r.index: next(iter(prefixes.chain(r)), None) for r in requests}
    longest: dict[SharedPrefix | None, int] = {}
    for r in requests:
        root = roots[r.index]
        longest[root] = max(longest.get(root, 0), len(r.own_ids))

    def place(r: EncodedRequest) -> tuple[Any, ...]:
        root, num_own = roots[r.index], len(r.own_ids)
        group = (num_own, (), ()) if root is None else (longest[root], root.ids, r.prefixes[-1])
        return (*group, num_own, len(r.forced), r.index)

    return sorted(requests, key=place)
