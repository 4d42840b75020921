"""Runs one block of batches of a tiny model through the loop, and records what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import read_config
from flexgen_jax.models.weight_source import DummyWeights
from flexgen_jax.offload.batch import AllThere, Batch
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.executor import BlockRun
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.parts import WeightsPart
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.schedule.backend import Backend
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.running import (
    CachedPart,
    LayerState,
    PromptPart,
    ReplacedPart,
    SealedPart,
)
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.costs import Costs
from flexgen_jax.search.memory import planned_ledger, run_workspace
from flexgen_jax.search.simulate import Simulation
from tests.helpers.models import BASE
from tests.helpers.profiles import machine

BACKENDS = ("runtime", "simulator")

Call = tuple[Any, ...]


def plan_of(
    policy: Policy, shape: BlockShape, unified: bool = False, config: ModelConfig | None = None
) -> BlockPlan:
    """The plan of a block of a tiny model in fp32."""
    return BlockPlan(Setting(config or read_config(BASE), "float32", unified), policy, shape)


class Recorder:
    """Hands a loop's calls on to a backend and writes them down; loads by the name of their part.

    is_done: replaces the backend's answer to the n-th question; None leaves it.
    """

    def __init__(self, backend: Backend, is_done: Callable[[int], bool] | None) -> None:
        self._backend, self._answer = backend, is_done
        self._asked = 0
        self._loads: list[tuple[Any, Any]] = []
        self.calls: list[Call] = []

    def is_done(self, handle: Any) -> bool:
        if self._answer is None:
            return self._backend.is_done(handle)
        self._asked += 1
        return self._answer(self._asked)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._backend, name)

        def call(*args: Any) -> Any:
            self.calls.append((name, *filter(None, map(self._described, args))))
            result = method(*args)
            if name == "fetch":
                self._loads.append((result, self.calls[-1][1]))
            return result

        return call

    def _described(self, value: Any) -> Any:
        """Returns what is alike for all backends of an argument, or None."""
        for load, name in self._loads:
            if value is load:
                return name
        return _described(value)

    def fetched(self, kind: type) -> dict[Any, int]:
        """Returns when each part of a kind was first asked for, by the part's name."""
        found: dict[Any, int] = {}
        for index, call in enumerate(self.calls):
            if call[0] == "fetch" and call[1][0] == kind.__name__:
                found.setdefault(call[1][1:], index)
        return found


def _described(value: Any) -> Any:
    """Returns what is alike for all backends of an argument, or None."""
    if isinstance(value, WeightsPart):
        return ("WeightsPart", value.keys)
    if isinstance(value, CachedPart | PromptPart | SealedPart):
        blocks = value.sealed if isinstance(value, CachedPart) else tuple(value.blocks)
        return (type(value).__name__, *_described(value.state), blocks)
    if isinstance(value, ReplacedPart):
        return ("ReplacedPart", value.layer, value.slot.running.number)
    if isinstance(value, LayerState):
        return (value.index, value.running.number)
    if isinstance(value, Step):
        return described_step(value)
    return value if isinstance(value, int) else None


def described_step(step: Step) -> tuple[int, int, int, int]:
    """Returns a step with its batch's number."""
    return step.token, step.layer, step.batch.number, step.visit


def run_block(
    backend: str,
    policy: Policy,
    shape: BlockShape,
    folder: Path,
    unified: bool = False,
    is_done: Callable[[int], bool] | None = None,
) -> tuple[Recorder, Ledger]:
    """Runs a block with a backend of `BACKENDS`; returns its calls, and the ledger."""
    plan = plan_of(policy, shape, unified)
    if backend == "simulator":
        costs = Costs(plan.setting, policy, machine())
        recorder = Recorder(Simulation(costs, plan, frozenset()), is_done)
        ledger = planned_ledger(plan)
        BlockLoop(plan, recorder, ledger).run()
        return recorder, ledger
    device, ledger = Device.create(plan.config, plan.formats, unified), Ledger({})
    disk = OffloadFolder(folder)
    weights = WeightStore(device, DummyWeights(plan.config), plan.tiers, ledger, disk)
    weights.place(lambda _: None)
    ledger.reserve("device", run_workspace(plan))
    batches = [
        Batch(np.full((batch.rows, batch.prompt_len), 5, np.int32), np.zeros(batch.rows, np.int32))
        for batch in shape.batches
    ]
    try:
        source = AllThere(plan, batches)
        run = BlockRun(device, weights, plan, source, ledger, disk, lambda *_: None)
        recorder = Recorder(run, is_done)
        BlockLoop(plan, recorder, ledger, arrivals=source).run()
    finally:
        weights.close()
        device.close()
        disk.close()
    return recorder, ledger
