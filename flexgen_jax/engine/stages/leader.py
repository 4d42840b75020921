"""Several stages as one model: starts their processes, sends them work, watches them.

this process: requests, end tokens, which batches enter and leave
   | what a slot computes, to all           ^ tokens, from the last
   v                                        |
stage 0: embedding, layers  ==>  stage 1: layers  ==>  stage 2: layers, head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.engine.planner import MIN_PROBED_RUN_S
from flexgen_jax.engine.stages.conductor import Conductor
from flexgen_jax.engine.stages.members import Members, stage_name
from flexgen_jax.engine.stages.worker import read_plan
from flexgen_jax.errors import UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.offload.batch import HeadResult
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.machines import generic_machine
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.progress import Progress
from flexgen_jax.requests.collector import Collector
from flexgen_jax.requests.feed import Incoming
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.ledger import BudgetError
from flexgen_jax.schedule.stages import Division, divided, divisions
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Problem
from flexgen_jax.search.stage_search import (
    ChainPlan,
    Link,
    Shape,
    StagePlan,
    chain_plan,
    fastest,
    search_stages,
)


class Stages:
    """The stages of one model: processes that this one has started, each with a range of layers and
    with a device, or a share of the cores, of its own; see `serving.Runner`."""

    def __init__(self, options: EngineOptions, config: ModelConfig, progress: Progress) -> None:
        count = options.stages
        if count > config.num_layers:
            raise UserError(f"--stages {count} is more than the model's {config.num_layers} layers")
        for name in ("trace", "breakdown", "hardware", "write_limit", "kv_store"):
            if getattr(options, name):
                raise UserError(f"{name} works with one stage only; remove it, or set stages=1")
        self._config, self._progress = config, progress
        self._report: dict[str, Any] | None = None
        self._known: dict[Workload, ChainPlan] = {}
        self._plan: ChainPlan | None = None
        self.policy: Policy | None = None
        self.workload: Workload | None = None
        self._divisions = divisions(model_spec(config), count)
        self._placed: Division | None = None
        self._members = Members(
            self._divisions[0], options.coordinator, worker_options(options), progress.say
        )
        ready = self._members.ready
        self.dtype: str = ready[0]["dtype"]
        on_cpu, unified = ready[0]["on_cpu"], ready[0]["unified"]
        sizes = KernelSizes() if on_cpu else KernelSizes.of_gpu()
        self._setting = Setting(config, self.dtype, unified, sizes)
        self._is_probed = all(answer["is_probed"] for answer in ready)
        seconds, rates = zip(*(answer["link"] for answer in ready), strict=True)
        self._link = Link(max(seconds), min(rates))
        self.given, self.is_auto = options.policy_on(unified, config), options.is_auto

    @property
    def shares_rows(self) -> bool:
        return False  # stages compute all that they are told

    @property
    def keeps_texts(self) -> bool:
        return False

    def stored_tokens(self, ids: tuple[int, ...]) -> int:
        return 0

    def is_worth_sharing(self, saved: int, requests: Sequence[EncodedRequest]) -> bool:
        return False

    def note(self, message: str) -> None:
        self._progress.say(message)

    @property
    def machine(self) -> str:
        return "the machines of all stages"

    def policy_for(self, workload: Workload) -> Policy:
        """Returns the policy of all stages; each stage has its own placement if it was searched;
        raises `BudgetError` if none fits."""
        if workload not in self._known:
            make_policy = self._searched if self.is_auto else self._as_given
            self._known[workload] = make_policy(workload, self.given)
        self._plan = self._known[workload]
        rows, batches, groups = self._plan.shape
        return replace(self.given, batch_size=rows, num_batches=batches * groups)

    def block_sequences(self, prompt_len: int, gen_len: int) -> int:
        policy = self.policy_for(Workload(prompt_len, gen_len, 1))
        return policy.batch_size * policy.num_batches

    def _as_given(self, workload: Workload, given: Policy) -> ChainPlan:
        """Returns the plan of a policy; raises `BudgetError` if it does not fit."""
        problem, hidden = self._problem(workload, given)
        groups = divided(given.num_batches, len(self._members))
        shape = Shape(given.batch_size, max(1, given.num_batches // groups), groups)
        policy = replace(given, num_batches=shape.batches * groups)
        plans, missing = list[ChainPlan](), list[str]()
        for layers in self._divisions:
            self._members.tell_parts(
                "check",
                layers,
                policy=policy.to_json(),
                workload=asdict(workload),
                groups=groups,
            )
            answers = self._members.answers("checked")
            stage_plans = [
                plan for answer in answers if (plan := read_plan(answer["plan"])) is not None
            ]
            if len(stage_plans) == len(layers):
                plans.append(chain_plan(problem, stage_plans, layers, shape, hidden, self._link))
            missing += [
                f"{stage_name(number, layer_range)}: the plan does not fit: {answer['missing'][0]}"
                for number, (layer_range, answer) in enumerate(zip(layers, answers, strict=True))
                if answer["missing"]
            ]
        best = fastest(plans, self._placed)
        if best is None:
            raise BudgetError(missing[0])
        return best

    def _searched(self, workload: Workload, policy: Policy) -> ChainPlan:
        """Returns the best plan, after probing the machines if a long run is predicted; raises
        `BudgetError` if none fits."""
        problem, _ = self._problem(workload, policy)

        def plan_all(shape: Shape, layers: Division) -> list[StagePlan | None]:
            self._members.tell_parts(
                "plan",
                layers,
                base=policy.to_json(),
                workload=asdict(workload),
                shape=list(shape),
            )
            return [read_plan(answer["plan"]) for answer in self._members.answers("planned")]

        def search() -> ChainPlan | None:
            return search_stages(problem, self._divisions, self._placed, plan_all, self._link)

        best = search()
        if best and not self._is_probed and best.total_s > MIN_PROBED_RUN_S:
            self._members.tell("probe")
            self._members.answers("probed")
            self._is_probed = True
            self._known.clear()
            best = search()
        if best is None:
            raise BudgetError(
                f"no policy fits {len(self._members)} stages; allow more memory or disk, or "
                "use --weight-bits 4"
            )
        return best

    def _problem(self, workload: Workload, base: Policy) -> tuple[Problem, int]:
        """Returns the problem of the whole model (without a machine), and the bytes of a token's
        hidden state."""
        problem = Problem(
            setting=self._setting,
            hw=generic_machine(self._setting.unified),
            budgets=Budgets(),
            workload=workload,
            base=base,
        )
        return problem, int(problem.costs(base).hidden_bytes(1, 1))

    def open(self, policy: Policy, workload: Workload, compiles: bool = False) -> None:
        """Brings the weights of all stages to where their policies put them."""
        self.policy, self.workload = policy, workload
        assert self._plan is not None, "it was planned"
        self._members.assign(self._plan.layers)
        self._placed = self._plan.layers
        policies = [stage.policy.to_json() for stage in self._plan.stages]
        self._members.tell_parts(
            "open",
            self._plan.layers,
            policies=policies,
            workload=asdict(workload),
            compiles=compiles,
        )
        self._members.answers("opened")

    # Runs

    def run(
        self, incoming: Incoming[EncodedRequest], collector: Collector, shares: bool
    ) -> Iterator[None]:
        assert not shares, "stages compute all that they are told"
        with self._progress.generating(collector.progress) as tick:
            for _ in self._slots(incoming, collector):
                tick()
                yield

    def _slots(self, incoming: Incoming[EncodedRequest], collector: Collector) -> Iterator[None]:
        """Walks the requests through all stages, one slot at a time."""
        self._report = None
        before = collector.num_tokens
        self._members.forget_results()
        self._members.tell("begin")
        self._members.answers("began")
        assert self._plan is not None and self.workload is not None, "it is open"
        plan = self._plan_of_group(self._plan.shape, self.workload)
        count, groups = len(self._members), self._plan.shape.groups
        conductor = Conductor(self, count, groups, plan, incoming, collector)
        try:
            yield from conductor.run()
        except BaseException:
            if len(self._members):
                self._members.tell("end")
                self._members.tell("drop")
                self._members.answers("dropped")
            raise
        self._members.tell("end")
        waiting = conductor.waiting
        incoming.put_back(waiting.unfinished())
        self._members.tell(
            "finish",
            num_sequences=waiting.entered,
            num_tokens=collector.num_tokens - before,
            prompts=list(waiting.prompts),
        )
        joined = _joined([answer["report"] for answer in self._members.answers("report")])
        self._report = {**joined, "predicted": _predicted(self._plan)}

    def tell_slot(self, **content: Any) -> None:
        self._members.tell("slot", **content)

    def result(self, batch: int) -> HeadResult:
        return self._members.result(batch)

    def _plan_of_group(self, shape: Shape, workload: Workload) -> BlockPlan:
        """Returns the plan of the whole model for one group."""
        assert self.policy is not None, "it is open"
        group_policy = replace(self.policy, num_batches=shape.batches)
        return BlockPlan(self._setting, group_policy, BlockShape.of(group_policy, workload))

    def back_off(self, error: Exception) -> None:
        raise error  # each stage has limits of its own

    def report(self, texts: Mapping[EncodedRequest, int] | None) -> dict[str, Any] | None:
        return self._report

    def close(self) -> None:
        self._members.close()


def worker_options(options: EngineOptions) -> dict[str, Any]:
    """Returns the options for stages."""
    arguments = options.arguments
    leader_options = (
        "policy",
        "stages",
        "coordinator",
        "progress",
        "trace",
        "hardware",
        "breakdown",
    )
    for name in leader_options:
        del arguments[name]
    for name in ("model", "offload_dir"):
        arguments[name] = None if arguments[name] is None else str(arguments[name])
    return arguments | {"adapter": list(options.adapters)}


def _predicted(plan: ChainPlan) -> dict[str, float]:
    """Returns the predicted times of a plan's workload."""
    return {
        "total_s": plan.total_s,
        "prefill_s": plan.prefill_s,
        "decode_s": plan.decode_s,
        "generation_throughput": plan.throughput,
    }


def _joined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the report of the last stage, which has the tokens, with those of all under
    "stages"."""
    totals = ("bytes", "decode_bytes", "peak_bytes")
    sums = {name: _added([report[name] for report in reports]) for name in totals}
    return {**reports[-1], **sums, "stages": list(reports)}


def _added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(stage_report[name] for stage_report in counts) for name in counts[0]}
