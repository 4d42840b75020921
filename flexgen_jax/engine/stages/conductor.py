"""Leads the stages of a model through a run: decides the content of each slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import cycle
from typing import Any, Protocol

import numpy as np

from flexgen_jax.engine.stages.worker import batch_arrays
from flexgen_jax.offload.batch import HeadResult
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.requests.batching import Waiting
from flexgen_jax.requests.collector import Collector
from flexgen_jax.requests.feed import Incoming
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.stages import told


class LedStages(Protocol):
    """The leader's interface to the stages."""

    def tell_slot(self, **content: Any) -> None:
        """Tells all stages of the next slot; see `worker.StageSource.hear`."""

    def result(self, batch: int) -> HeadResult:
        """Returns the last stage's head result for a batch's step; waits for it."""


class Conductor:
    """Decides the work of the stages in one run: admission of batches, their steps per slot, and
    their end."""

    def __init__(
        self,
        stages: LedStages,
        count: int,
        groups: int,
        plan: BlockPlan,
        incoming: Incoming[EncodedRequest],
        collector: Collector,
    ) -> None:
        """count: of the stages; groups: of batches that are under way at once; plan: of the whole
        model for one group."""
        self._stages, self._count = stages, count
        self._collector = collector
        self.waiting = Waiting(plan, incoming, collector)
        self._groups: list[list[Running]] = [[] for _ in range(groups)]
        self._asked: dict[Running, tuple[int, int]] = {}
        self._ids: dict[Running, np.ndarray] = {}
        self._number = 0

    def run(self) -> Iterator[None]:
        for group in cycle(self._groups):
            leaving = self._receive(group)
            entered = self.waiting.enter(group, None)
            group += entered
            if group:
                self._tell(group, entered, leaving)
            elif not any(self._groups):
                if leaving:
                    self._tell(group, [], leaving)
                if not self.waiting.wait():
                    return
            elif leaving:
                self._tell(group, [], leaving)
            yield

    def _receive(self, group: list[Running]) -> list[int]:
        """Receives the tokens of a group's last slot; returns finished batches, by number."""
        leaving = []
        for batch in list(group):
            if batch not in self._asked:
                continue  # a chunk of a prompt has no token
            token, number = self._asked.pop(batch)
            while self._number <= number + self._count - 2:
                self._tell([], [], [])  # or the slot would not get to the last stage
            result = self._stages.result(batch.number)
            unfinished_rows = self._collector.receive(self.waiting.members[batch], token, result)
            self._ids[batch] = self._chosen(batch, token, result)
            if not unfinished_rows or not batch.left:
                group.remove(batch)
                del self._ids[batch]
                batch.close()
                leaving.append(batch.number)
        return leaving

    def _chosen(self, batch: Running, token: int, result: HeadResult) -> np.ndarray:
        """Returns what a batch's next step embeds, int32 [batch, 1]."""
        inputs = self.waiting.given(batch)
        if inputs.forced is not None:
            return inputs.forced[:, token : token + 1]
        if inputs.targets is not None and not inputs.chooses:
            return inputs.targets[:, -1:]
        ids: np.ndarray = result.ids
        return ids

    def _tell(
        self, group: Sequence[Running], entering: Sequence[Running], leaving: Sequence[int]
    ) -> None:
        """Tells all stages of the next slot."""
        steps = [(batch, batch.left.popleft()) for batch in group]
        self._stages.tell_slot(
            number=self._number,
            steps=[tuple(step) for step in told(steps)],
            entering=[
                [batch.number, astuple(batch.shape), batch_arrays(self.waiting.given(batch))]
                for batch in entering
            ],
            leaving=leaving,
            more=[[batch.number, self._more(batch, token)] for batch, token in steps],
        )
        for batch, token in steps:
            if token >= 0:
                self._asked[batch] = (token, self._number)
        self._number += 1

    def _more(self, batch: Running, token: int) -> dict[str, Any]:
        """Returns a step's further arguments: the tokens before it, and what choosing depends
        on."""
        if token < 0:
            return {}
        ids = {"ids": self._ids[batch]} if token > 0 else {}
        adjusted, allowed = self.waiting.adjusted(batch), self.waiting.allowed(batch)
        return {"adjusted": adjusted, "allowed": allowed, **ids}
