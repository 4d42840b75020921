"""Layers that do not attend: what they keep is counted, placed and moved like a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax.offload.batch import AllThere, Batch, HeadResult
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.executor import BlockRun
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.schedule.admission import block_of
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.memory import dry_run, peak_bytes, run_workspace
from flexgen_jax.search.simulate import simulate
from tests.helpers.mixers import NumpyMixed, RandomWeights, mixed_config, mixers
from tests.helpers.profiles import costs_of

ROWS, PROMPT, TOKENS = 4, 16, 9
CONFIG = mixed_config()
LENGTHS = [16, 3, 9, 1]
ENDS = [9, 2, 9, 5]
"""Tokens after which rows are finished: the batches shrink."""


@pytest.fixture(autouse=True)
def known_kinds() -> Iterator[None]:
    with mixers():
        yield


def given(seed: int) -> Batch:
    """A batch of left-padded prompts."""
    ids = np.random.default_rng(seed).integers(3, 90, (ROWS, PROMPT)).astype(np.int32)
    first = PROMPT - np.array(LENGTHS, np.int32)
    return Batch(ids, first, most=np.full(ROWS, PROMPT + TOKENS, np.int32))


BATCHES = [given(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """The greedy tokens of each batch's rows, by the formulas."""
    model = NumpyMixed(CONFIG, RandomWeights(CONFIG))
    return [
        [
            model.greedy(ids[first:].tolist(), end)
            for ids, first, end in zip(batch.ids, batch.first_valid, ENDS, strict=True)
        ]
        for batch in BATCHES
    ]


class Run:
    """Runs the batches, and keeps each row's tokens until it is finished."""

    def __init__(self, plan: BlockPlan, folder: Path, shrinks: bool) -> None:
        self.tokens: list[list[list[int]]] = [[[] for _ in range(ROWS)] for _ in BATCHES]
        self._members = [list(range(ROWS)) for _ in BATCHES]
        self._shrinks = shrinks
        device, self.ledger = Device.create(CONFIG, plan.formats, plan.unified), Ledger({})
        disk = OffloadFolder(folder)
        weights = WeightStore(device, RandomWeights(CONFIG), plan.tiers, self.ledger, disk)
        weights.place(lambda _: None)
        self.ledger.reserve("device", run_workspace(plan))
        try:
            source = Kept(plan, BATCHES, self._members)
            run = BlockRun(
                device=device,
                weights=weights,
                plan=plan,
                source=source,
                ledger=self.ledger,
                folder=disk,
                on_result=self.receive,
                peaks=peak_bytes(plan),
            )
            device.metrics.reset()
            for _ in run.run():
                pass
            self.bytes = device.metrics.report()["bytes"]
            self.files = list(folder.glob("runs/*/*"))
        finally:
            weights.close()
            device.close()
            disk.close()

    def receive(self, step: Step, result: HeadResult) -> list[int] | None:
        number = step.batch.number
        members = self._members[number]
        for row, token in zip(members, result.ids[:, 0].tolist(), strict=False):
            if len(self.tokens[number][row]) < ENDS[row]:
                self.tokens[number][row].append(token)
        if not self._shrinks:
            return None
        return [at for at, row in enumerate(members) if step.token + 1 < ENDS[row]]


class Kept(AllThere):
    """Remembers which of a batch's rows are left."""

    def __init__(self, plan: BlockPlan, batches: list[Batch], members: list[list[int]]) -> None:
        super().__init__(plan, batches)
        self._members = members

    def keep(self, running: Any, rows: Any) -> None:
        super().keep(running, rows)
        members = self._members[running.number]
        self._members[running.number] = [members[row] for row in rows]


def plan_of(percent: tuple[int, ...], unified: bool, **options: Any) -> BlockPlan:
    policy = Policy.from_percent(
        *percent, batch_size=ROWS, num_batches=3, **{"kv_block_tokens": 4, **options}
    )
    shape = BlockShape((ROWS,) * 3, (PROMPT,) * 3, TOKENS)
    return BlockPlan(Setting(CONFIG, "float32", unified), policy, shape)


CASES = [
    ((100, 0, 100, 0, 100, 0), {}),
    ((0, 100, 0, 100, 0, 100), {}),
    ((0, 100, 0, 100, 0, 100), {"attention": "device", "prefill_chunk": 6}),
    ((0, 0, 0, 0, 0, 0), {}),
    ((0, 0, 0, 0, 0, 0), {"overlap": False, "schedule": "row"}),
    ((30, 40, 20, 40, 0, 50), {"attention": "device", "schedule": "diagonal"}),
    ((30, 40, 20, 40, 0, 50), {"prefill_chunk": 6}),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    ("percent", "options", "shrinks"),
    [(*case, number % 2 == 1) for number, case in enumerate(CASES)],
)
def test_tokens_are_those_of_the_formulas_wherever_state_lies(
    tmp_path: Path,
    expected: list[list[list[int]]],
    percent: tuple[int, ...],
    options: dict[str, Any],
    shrinks: bool,
    unified: bool,
) -> None:
    plan = plan_of(percent, unified, **options)
    run = Run(plan, tmp_path, shrinks)
    assert run.tokens == expected
    assert not run.files
    bound = peak_bytes(plan)
    for tier, peak in run.ledger.peak.items():
        assert peak <= bound[tier], tier


@pytest.mark.few(2)
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("percent", "options"), CASES[1:6:2])
def test_bytes_and_peaks_are_predicted(
    tmp_path: Path, percent: tuple[int, ...], options: dict[str, Any], unified: bool
) -> None:
    plan = plan_of(percent, unified, **options)
    costs = costs_of(CONFIG, "float32", plan.policy, unified=unified)
    predicted = simulate(costs, plan)
    run = Run(plan, tmp_path, shrinks=False)
    for link, nbytes in run.bytes.items():
        assert predicted.bytes[link] == pytest.approx(nbytes, rel=0.02), link
    bound, worst = peak_bytes(plan), dry_run(plan)
    for tier, peak in predicted.peak_bytes.items():
        assert peak <= worst[tier] <= bound[tier], tier


def test_replaced_arrays_are_placed_by_the_fractions_of_the_cache() -> None:
    """Half of the bytes of what all layers keep are on the device, half on the host."""
    plan = plan_of((100, 0, 50, 50, 100, 0), unified=False)
    held = {"device": 0, "host": 0}
    for state in (state for running in block_of(plan) for state in running.layers):
        for home, sizes in zip(state.homes, state.sizes, strict=True):
            held[home] += sizes.sealed
        if state.layer.replaced:
            assert state.replaced().nbytes == 4 * ROWS * 16
            held[state.replaced_home] += state.replaced().nbytes
    assert held["device"] == pytest.approx(held["host"], rel=0.1)


@pytest.mark.slow
def test_packed_blocks_are_within_rounding(tmp_path: Path) -> None:
    """What grows is quantized, what is replaced never is."""
    plan = plan_of((0, 0, 0, 0, 0, 0), unified=False, cache_bits=8)
    layers = [layer for layer in plan.spec.decoders if not layer.attends]
    growing = [leaf for layer in layers for leaf in layer.growing]
    replaced = [leaf for layer in layers for leaf in layer.replaced]
    assert {plan.formats.sealed(leaf, 1, 4).bits for leaf in growing} == {8}
    assert {plan.formats.plain(leaf, 1).bits for leaf in replaced} == {16}
    alone = Run(plan_of((100, 0, 100, 0, 100, 0), True, cache_bits=8), tmp_path / "a", False)
    assert Run(plan, tmp_path / "b", False).tokens == alone.tokens
