"""Creates a run's batches at admission, with the homes of their states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from flexgen_jax.policy.placement import Homes, Placer
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.shapes import BatchShape
from flexgen_jax.policy.sharing import Shared, spans_of
from flexgen_jax.schedule.running import LayerState, ReplacedSlot, Running


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
        shared: Sequence[tuple[Shared[Running], ...]] = (),
        numbers: Sequence[int] = (),
        are_prefixes: bool = False,
    ) -> list[Running]:
        """Returns batches that enter together.

        is_first: whether no others go on; shared: of each batch, the prefixes of its rows, by
        default none; numbers: theirs, by default the next ones; are_prefixes: whether they are
        prefixes, of one row each.
        """
        lengths = [self.plan.blocks(shape).all for shape in shapes]
        homes = self._placer.enter(lengths, is_first)
        numbers = numbers or [next(self._numbers) for _ in shapes]
        shared = shared or [()] * len(shapes)
        return [
            running_batch(self.plan, number, shape, home, prefixes, are_prefixes)
            for number, shape, home, prefixes in zip(numbers, shapes, homes, shared, strict=True)
        ]


def running_batch(
    plan: BlockPlan,
    number: int,
    shape: BatchShape,
    homes: Homes,
    shared: tuple[Shared[Running], ...] = (),
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
        is_prefix=is_prefix,
    )
    running.share(shared)
    layers = zip(plan.spec.decoders, homes.blocks, homes.replaced, strict=True)
    # A prefix's final recurrent state is the initial state of all its rows.
    running.layers = [
        LayerState(
            running,
            layer,
            of_blocks,
            "device" if is_prefix else of_replaced,
            ReplacedSlot(running, "cache"),
        )
        for layer, of_blocks, of_replaced in layers
    ]
    running.left.extend(running.tokens)
    return running


def block_of(plan: BlockPlan) -> list[Running]:
    """Returns the batches of a plan's `entries` as if all had entered, prefixes first; each prefix
    is shared by an equal number of rows."""
    shapes = [shape for group, _ in plan.entries for shape in group]
    prefixes, batches = list[Running](), list[Running]()
    before, total = 0, sum(plan.shape.batch_sizes)
    for number, (shape, homes) in enumerate(zip(shapes, plan.block_homes, strict=True)):
        if number < len(plan.shape.prefix_batches):
            prefixes.append(running_batch(plan, number, shape, homes, is_prefix=True))
            continue
        rows = range(before, before + shape.rows) if prefixes else ()
        of_rows = [(prefixes[row * len(prefixes) // total],) for row in rows]
        batches.append(running_batch(plan, number, shape, homes, spans_of(of_rows)))
        before += shape.rows
    return [*prefixes, *batches]
