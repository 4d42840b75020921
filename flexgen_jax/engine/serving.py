"""Walks requests through a model: plans for the waiting requests, runs them, and plans again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import jax

from flexgen_jax.errors import MachineError, UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.offload.disk.kv_pieces import DamagedError
from flexgen_jax.policy.policy import SAMPLE, Policy, Workload
from flexgen_jax.requests.collector import Collector
from flexgen_jax.requests.feed import Incoming, Listed
from flexgen_jax.requests.padding import padded_length
from flexgen_jax.requests.prefix_sharing import share
from flexgen_jax.requests.prefixes import padded_prefix
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.ledger import BudgetError

FIRST_READ = 16
"""Requests of a stream that are read before it is known how many run together."""

STREAM_TOKENS = 64
"""A stream whose first texts differ in length is planned for a multiple of this many new tokens,
since a longer text waits until all others are finished."""

UNKNOWN = 256
"""Number of requests that a stream is planned for until it ends."""


class Runner(Protocol):
    """Runs a model: in this process (`LocalRunner`), or as stages (`Stages`)."""

    @property
    def given(self) -> Policy:
        """The requested policy; if it `is_auto`, placements and batches are searched."""

    @property
    def is_auto(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def policy(self) -> Policy | None:
        """The policy of the last run; None before the first one."""

    @property
    def machine(self) -> str:
        """The profile that policies are searched for, in words."""

    @property
    def shares_rows(self) -> bool:
        """Whether a row may compute what several requests share."""

    @property
    def keeps_texts(self) -> bool:
        """Whether there is a KV store."""

    def stored_tokens(self, ids: tuple[int, ...]) -> int:
        """Returns how many of a prompt's first tokens are in the KV store, and worth loading."""

    def is_worth_sharing(self, saved: int, requests: Sequence[EncodedRequest]) -> bool:
        """Returns whether requests should share prefixes, which saves `saved` tokens."""

    def note(self, message: str) -> None:
        """Says something to the user."""

    def policy_for(self, workload: Workload) -> Policy:
        """Returns a policy that fits; raises `BudgetError` if none does."""

    def block_sequences(self, prompt_len: int, gen_len: int) -> int:
        """Returns how many sequences of these lengths one block of batches holds."""

    def open(self, policy: Policy, workload: Workload, compiles: bool = False) -> None:
        """Brings the weights to where a policy puts them; compiles: also the programs of a greedy
        run."""

    def run(
        self, incoming: Incoming[EncodedRequest], collector: Collector, shares: bool
    ) -> Iterator[None]:
        """Walks requests through the model, one step at a time; puts back requests outside the
        plan. shares: whether later requests may share prefixes."""

    def back_off(self, error: Exception) -> None:
        """Plans for less after running out of memory; raises any other error, and this one if that
        is not possible. After a `MachineError`, the next run places its weights again, reading
        damaged ones from the checkpoint."""

    def report(self, texts: Mapping[EncodedRequest, int] | None) -> dict[str, Any] | None:
        """Returns the last run's measurements, None before the first run; texts: as for
        `Planner.predicted`."""

    def close(self) -> None:
        """Frees everything. Nothing can be run afterwards."""


class Serving:
    """Runs generations and scorings one at a time.

    shares: whether requests may share prefixes; running: the current one; latest: the
    last one; texts: the tokens of each of its texts.
    """

    def __init__(self, runner: Runner, config: ModelConfig, shares: bool) -> None:
        self._runner, self._config, self.shares = runner, config, shares
        self.running: Collector | None = None
        self.upcoming: Collector | None = None
        self.latest: Collector | None = None
        self.texts: Mapping[EncodedRequest, int] | None = {}
        self.is_closed = False

    def check_open(self) -> None:
        """Raises `UserError` after closing."""
        if self.is_closed:
            raise UserError("this LLM is closed; create another one")

    def cancel(self, request_id: str) -> None:
        """Cancels a request that is running or about to run."""
        for collector in {self.running, self.upcoming}:
            if collector is not None:
                collector.cancel(request_id)

    def expected(self, prompt_len: int, gen_len: int) -> Workload:
        """Returns a workload of texts that may be sampled, no longer than the model can take."""
        max_positions = self._config.max_positions
        gen_len = min(gen_len, max(1, max_positions // 2))
        return Workload(min(prompt_len, max(1, max_positions - gen_len)), gen_len, head=SAMPLE)

    def run_all(self, requests: Sequence[EncodedRequest], collector: Collector) -> None:
        """Runs requests that are all there."""
        collector.begin(requests)
        for _ in self.serve(Incoming(Listed(requests)), collector):
            pass

    def serve(
        self,
        incoming: Incoming[EncodedRequest],
        collector: Collector,
        allow: Callable[[int], object] = lambda rows: None,
        expected: Workload | None = None,
    ) -> Iterator[None]:
        """Walks all requests through the model, one step at a time.

        A plan that runs out of memory is replaced by a smaller one, which begins with the requests
        that are not finished; one that is too small for a request, by a larger one. allow: told how
        many requests may be read ahead; expected: has lengths for the first plan.
        """
        self._begin(incoming, collector)
        workload = expected
        is_first = True
        try:
            while incoming.wait():
                allow(1)  # no more than these while it is planned for them
                requests = incoming.take(FIRST_READ)
                if not requests:
                    yield  # all that came was impossible
                    continue
                shares = self.shares and collector.may_share
                if shares:
                    requests = share(
                        requests,
                        stored=self._runner.stored_tokens,
                        is_worth=self._runner.is_worth_sharing,
                    )
                incoming.put_back(requests)
                together = _planned_together(requests, is_first)
                is_first = False
                least = self._workload(together, collector)
                workloads = [least] if workload is None else [least.covering(workload), least]
                if not incoming.is_ended:
                    if shares and self._runner.keeps_texts:
                        workloads = list(map(_with_room_for_stored, workloads))
                    if len({request.max_tokens for request in together}) > 1:
                        workloads = list(map(self._with_longer_texts, workloads))
                    workloads = [
                        _as_many(candidate, max(len(requests), UNKNOWN)) for candidate in workloads
                    ]
                workload, policy = self._first_that_fits(workloads)
                allow(max(1, policy.batch_size * policy.num_batches // 2))
                try:
                    self._runner.open(policy, workload)
                    yield from self._runner.run(incoming, collector, shares)
                except DamagedError as error:  # it is not there any more
                    self._runner.note(f"flexgen-jax: {error}; recomputing it")
                    incoming.begin_again(collector.restart())
                except (MachineError, MemoryError, jax.errors.JaxRuntimeError) as error:
                    self._runner.back_off(error)
                    incoming.begin_again(collector.restart())
        finally:
            self.running = None
            self.texts = collector.texts

    def _first_that_fits(self, workloads: Sequence[Workload]) -> tuple[Workload, Policy]:
        """Returns the first workload with a policy, and the policy; raises `BudgetError` if the
        last workload has none."""
        for workload in workloads[:-1]:
            with suppress(BudgetError):
                return workload, self._runner.policy_for(workload)
        return workloads[-1], self._runner.policy_for(workloads[-1])

    def _begin(self, incoming: Incoming[EncodedRequest], collector: Collector) -> None:
        self.check_open()
        if self.running is not None:
            raise UserError("this LLM is already running; finish or close its stream first")
        self.running = collector
        self.latest = collector
        collector.on_later = incoming.put_back
        if self.upcoming is collector:
            self.upcoming = None

    def _with_longer_texts(self, workload: Workload) -> Workload:
        """Returns a workload with room for texts a little longer than those known."""
        gen_len = -(-workload.gen_len // STREAM_TOKENS) * STREAM_TOKENS
        room = self._config.max_positions - workload.prompt_len - workload.prefix_len
        return replace(workload, gen_len=max(workload.gen_len, min(gen_len, room)))

    def _workload(self, requests: Sequence[EncodedRequest], collector: Collector) -> Workload:
        """Returns the workload of requests."""
        room = self._config.max_positions - min(request.prefix_len for request in requests)
        lengths = [padded_length(len(request.own_ids), room) for request in requests]
        shared = _own_lengths(requests)
        mean = -(-sum(lengths) // len(lengths))
        return Workload(
            prompt_len=max(lengths),
            gen_len=max(request.max_tokens for request in requests),
            num_sequences=len(requests),
            head=collector.head_of(requests),
            mean_prompt_len=mean if mean < max(lengths) else None,
            prefix_len=max(map(padded_prefix, shared), default=0),
            num_prefixes=max(1, len(shared)),
            prefix_depth=max(1, *(len(request.shared) for request in requests)),
        )


def _planned_together(
    requests: Sequence[EncodedRequest], is_first: bool
) -> Sequence[EncodedRequest]:
    """Returns the requests to plan for together: where some share
    prefixes, these and others that are no longer without them; is_first: whether none of them has
    been left by an earlier plan, as the first one may have been, which must go now."""
    lengths = [len(request.own_ids) for request in requests if request.shared]
    if not lengths:
        return requests
    longest = max(lengths if is_first else [*lengths, len(requests[0].own_ids)])
    return [r for r in requests if r.shared or len(r.own_ids) <= longest]


def _with_room_for_stored(workload: Workload) -> Workload:
    """Returns a workload with room for prefixes that later requests may load: a whole prompt."""
    return replace(
        workload,
        prefix_len=max(workload.prefix_len, padded_prefix(workload.prompt_len)),
        num_prefixes=max(1, workload.num_sequences),
    )


def _as_many(workload: Workload, count: int) -> Workload:
    """Returns a workload of more sequences; several prefixes suggest that more will come, one
    prefix that another may come."""
    prefixes, sequences = workload.num_prefixes, max(1, workload.num_sequences)
    prefixes = 2 if prefixes == 1 else -(-prefixes * count // sequences)
    return replace(workload, num_sequences=count, num_prefixes=prefixes)


def _own_lengths(requests: Sequence[EncodedRequest]) -> list[int]:
    """Returns the number of tokens of each different prefix after the prefix that it extends."""
    tokens: dict[tuple[int, ...], int] = {}
    for request in requests:
        lengths = pairwise((0, *request.shared))
        for ids, (before, length) in zip(request.prefixes, lengths, strict=True):
            tokens[ids] = length - before
    return list(tokens.values())
