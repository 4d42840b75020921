"""Makes the batches of a run as they enter, each with the homes of what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from flexgen_jax.policy.placement import Homes, Placer
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.running import LayerState, ReplacedSlot, Running
from flexgen_jax.policy.shapes import BatchShape


class Admission:
    """Makes batches of a run as they enter."""

    def __init__(self, plan: BlockPlan) -> None:
        self.plan = plan
        self._placer = Placer(plan.spec, plan.policy)
        self._numbers = count()

    def enter(
        self,
        shapes: Sequence[BatchShape],
        is_first: bool,
        prefix: Running | None = None,
        numbers: Sequence[int] = (),
    ) -> list[Running]:
        """Returns batches that enter together.

        is_first: whether no others go on; prefix: what they share, if anything; numbers: theirs,
        by default the next ones.
        """
        lengths = [self.plan.blocks(shape).all for shape in shapes]
        homes = self._placer.enter(lengths, is_first)
        numbers = numbers or [next(self._numbers) for _ in shapes]
        return [
            running_batch(self.plan, number, shape, where, prefix)
            for number, shape, where in zip(numbers, shapes, homes, strict=True)
        ]

    def enter_prefix(self) -> Running:
        """Returns the batch of the prefix that the plan's batches share."""
        shape = self.plan.shape.prefix_batch
        assert shape is not None, "the plan has a prefix"
        (homes,) = self._placer.enter([self.plan.blocks(shape).all], is_first=True)
        return running_batch(self.plan, next(self._numbers), shape, homes, is_prefix=True)


def running_batch(
    plan: BlockPlan,
    number: int,
    shape: BatchShape,
    homes: Homes,
    prefix: Running | None = None,
    is_prefix: bool = False,
) -> Running:
    """Returns a batch that is about to enter."""
    blocks = plan.blocks(shape)
    running = Running(
        number=number,
        plan=plan,
        shape=shape,
        chunks=plan.chunks(shape),
        blocks=blocks,
        lengths=blocks.all,
        hidden_homes=homes.hidden,
        prefix=prefix,
        is_prefix=is_prefix,
    )
    each = zip(plan.spec.decoders, homes.blocks, homes.replaced, strict=True)
    # What a prefix leaves in layers with a state is what all its rows begin with.
    running.layers = [
        LayerState(
            running,
            layer,
            of_blocks,
            "device" if is_prefix else of_replaced,
            ReplacedSlot(running, "cache"),
        )
        for layer, of_blocks, of_replaced in each
    ]
    running.left.extend(running.tokens)
    return running


def block_of(plan: BlockPlan) -> list[Running]:
    """Returns the batches of a plan's `entries` as if all had entered, the prefix first."""
    prefix: Running | None = None
    batches: list[Running] = []
    shapes = [shape for group, _ in plan.entries for shape in group]
    for number, (shape, homes) in enumerate(zip(shapes, plan.block_homes, strict=True)):
        is_prefix = number == 0 and plan.shape.prefix > 0
        running = running_batch(plan, number, shape, homes, prefix, is_prefix)
        prefix = running if is_prefix else prefix
        batches.append(running)
    return batches
