"""Predicts the time of a run whose completion lengths are known, as they are afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.offload.batch import Batch
from flexgen_jax.policy.placement import page_cached
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy
from flexgen_jax.requests.batching import Waiting
from flexgen_jax.requests.feed import Listed
from flexgen_jax.requests.generation import Generation
from flexgen_jax.requests.padding import padded_length
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.problem import Problem
from flexgen_jax.search.simulate import Prediction, simulate_texts

MAX_SIMULATED_STEPS = 30_000
"""Longer runs are not simulated step by step."""


class Shapes(Generation):
    """A generation whose batches have shapes, and no content."""

    def batch(self, config: ModelConfig, members: Sequence[EncodedRequest], rows: int) -> Batch:
        max_length = config.max_positions - min(r.prefix_len for r in members)
        tokens = padded_length(max(len(r.own_ids) for r in members), max_length)
        return Batch(np.zeros((rows, tokens), np.int8), np.zeros(rows, np.int8))


class KnownTexts(Waiting):
    """Requests with known completion lengths; see `simulate.Texts`."""

    def __init__(
        self, plan: BlockPlan, requests: Sequence[EncodedRequest], ends: Mapping[int, int]
    ) -> None:
        """ends: tokens of each text, by the requests' indices."""
        super().__init__(plan, Listed(requests), Shapes(None, (), lambda request, output: None))
        self._ends = ends
        self._left: dict[Running, list[int]] = {}

    def rows_left(self, step: Step) -> int:
        members = enumerate(self.members.get(step.batch, ()))
        unfinished_rows = [row for row, r in members if self._ends[r.index] > step.token + 1]
        self._left[step.batch] = unfinished_rows
        return len(unfinished_rows)

    def shrink(self, batch: Running, rows: int) -> None:
        unfinished_rows = self._left[batch]
        finished_rows = [row for row in range(self.given(batch).size) if row not in unfinished_rows]
        self.keep(batch, [*unfinished_rows, *finished_rows][:rows])


def predicted_time(
    problem: Problem, policy: Policy, texts: Mapping[EncodedRequest, int]
) -> Prediction | None:
    """Returns the prediction for requests that end after these tokens; None if the run is too
    long."""
    requests, ends = list(texts), {r.index: tokens for r, tokens in texts.items()}
    blocks = -(-len(requests) // (policy.batch_size * policy.num_batches))
    layers = len(problem.costs(policy).spec.layers)
    steps = blocks * max(ends.values()) * policy.num_batches * layers
    if steps > MAX_SIMULATED_STEPS:
        return None
    plan = problem.plan(policy)
    known_texts = KnownTexts(plan, requests, ends)
    costs = problem.costs(policy)
    spare = problem.budgets.spare_ram(problem.peak(policy))
    cached = page_cached(costs.spec, costs.formats, plan.tiers, spare)
    return simulate_texts(costs, plan, known_texts, cached)
