"""Forms batches of requests that wait, and lets them enter a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from flexgen_jax.engine.sampling import SamplingParams
from flexgen_jax.offload.executor import Batch
from flexgen_jax.policy.plan import BatchShape, BlockPlan

LENGTH_BUCKET = 16
"""Prompts are padded to a multiple of this, so that few shapes are compiled."""


@dataclass(frozen=True)
class EncodedRequest:
    """One sequence to continue.

    max_tokens: the new tokens that its parameters ask for, limited by the room in the model's
    context; forced: tokens to continue it with, in order to score them.
    """

    index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    forced: tuple[int, ...] = ()


def padded_length(tokens: int, max_positions: int) -> int:
    """Returns the length rounded up to the next bucket, limited by the model's context, at least
    1."""
    return max(min(-(-tokens // LENGTH_BUCKET) * LENGTH_BUCKET, max_positions), 1)


def grouped(requests: Sequence[EncodedRequest], batch_size: int) -> list[Sequence[EncodedRequest]]:
    """Spreads requests evenly over as few batches as hold them, in their order."""
    size = -(-len(requests) // -(-len(requests) // batch_size))
    return [requests[i : i + size] for i in range(0, len(requests), size)]


class Waiting:
    """Requests that wait for their batches to enter: the `Arrivals` of a run.

    Those of similar length go together. members: the requests of the batches that are there, by
    number.
    """

    def __init__(
        self,
        plan: BlockPlan,
        requests: Sequence[EncodedRequest],
        make: Callable[[Sequence[EncodedRequest], int], Batch],
    ) -> None:
        """make: makes a batch of its requests, with that many rows."""
        self._plan, self._make = plan, make
        self._requests = sorted(requests, key=lambda r: (len(r.prompt_ids), len(r.forced), r.index))
        self._numbers = count()
        self._batches: dict[int, Batch] = {}
        self.members: dict[int, Sequence[EncodedRequest]] = {}

    @property
    def batches(self) -> Mapping[int, Batch]:
        """What is computed of the batches that are there, by number."""
        return self._batches

    def enter(self, going: Collection[int], most: int | None) -> Mapping[int, Sequence[int]]:
        """Lets as many batches enter as the plan has rows for beside those that are `going`."""
        policy = self._plan.policy
        rows = policy.batch_size * (most or policy.num_batches)
        busy = sum(self._plan.batches[number].rows for number in going)
        free = min(rows, policy.batch_size * policy.num_batches - busy, len(self._requests))
        if free <= 0:
            return {}
        members, self._requests = self._requests[:free], self._requests[free:]
        groups = grouped(members, policy.batch_size)
        entered = {}
        for group in groups:
            batch = self._make(group, len(groups[0]))
            tokens = max(request.max_tokens for request in group)
            number = next(self._numbers)
            self._batches[number], self.members[number] = batch, group
            entered[number] = BatchShape(
                batch.size, batch.prompt_len, tokens, batch.targets is not None
            )
        self._plan.enter(entered, is_first=not going)
        return {number: range(shape.gen_len) for number, shape in entered.items()}

    def keep(self, batch: int, rows: Sequence[int]) -> None:
        """Leaves a batch with these rows; rows beyond the requests are padding, and come last."""
        self._batches[batch] = self._batches[batch].taken(rows)
        members = self.members[batch]
        self.members[batch] = [members[row] for row in rows if row < len(members)]

    def leave(self, batch: int) -> None:
        """Forgets a batch."""
        self._plan.leave(batch)
        del self._batches[batch], self.members[batch]

    def wait(self) -> bool:
        return False


def pad_prompts(
    batch: Sequence[EncodedRequest], rows: int, pad_id: int, max_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns left-padded ids, int32 [rows, token], and the index of each row's first real token,
    int32 [rows].

    Rows beyond the batch count as one padding token, so that all batches of a block have equal
    shapes.
    """
    tokens = padded_length(max(len(r.prompt_ids) for r in batch), max_positions)
    ids = np.full((rows, tokens), pad_id, np.int32)
    first_valid = np.full(rows, tokens - 1, np.int32)
    for row, request in enumerate(batch):
        first_valid[row] = tokens - len(request.prompt_ids)
        ids[row, first_valid[row] :] = request.prompt_ids
    return ids, first_valid
