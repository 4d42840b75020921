"""Chooses or checks the policy of a run against what the machine has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from flexgen_jax.errors import first_line
from flexgen_jax.machine.limits import detect_budgets
from flexgen_jax.machine.profiles import cached_profile, measured_profile
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.policy.fit import Budgets, Fitter
from flexgen_jax.policy.hardware import HardwareProfile, KernelSizes
from flexgen_jax.policy.ledger import BudgetError
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.search import Choices, Plan, Problem, evaluate, search
from flexgen_jax.progress import Progress

WORTH_MEASURING_S = 120.0
"""A run that is predicted to be shorter is planned without measuring the machine first."""

STAY = 1.25
"""Weights stay where they are as long as that takes at most so many times the time."""

BACK_OFF, BACK_OFFS = 0.8, 5
"""After running out of memory, a plan for so much of what was allowed; so many times."""


@dataclass
class Planner:
    """One model's limits, and a policy; with `is_auto` placements and batches are searched.

    profile: of the machine to plan for; None is this one's, measured if it is worth it.
    """

    config: ModelConfig
    dtype: str
    policy: Policy
    is_auto: bool
    device_memory: int | None
    host_memory: int | None
    disk_space: int | None
    offload_dir: Path
    fingerprint: str
    unified: bool
    sizes: KernelSizes
    progress: Progress
    profile: HardwareProfile | None = None
    _plan: Plan | None = field(default=None, init=False)
    _budgets: Budgets | None = field(default=None, init=False)
    _backed_off: int = field(default=0, init=False)
    _known: dict[Workload, Plan] = field(default_factory=dict, init=False)

    @property
    def budgets(self) -> Budgets:
        """Detected once, before the run itself uses memory."""
        if self._budgets is None:
            asked = (self.device_memory, self.host_memory, self.disk_space)
            self._budgets = detect_budgets(*asked, self.offload_dir, self.fingerprint, self.unified)
        return self._budgets

    def block_sequences(self, prompt_len: int, gen_len: int) -> int:
        """Sequences in one block of the given policy, or in the one that is best."""
        if not self.is_auto:
            return self.policy.batch_size * self.policy.num_batches
        return self._best(Workload(prompt_len, gen_len, 0)).block_sequences

    def policy_for(self, workload: Workload) -> Policy:
        """A policy that fits, or `BudgetError` with the numbers and the nearest one that does."""
        if not self.is_auto:
            self._check(self._fitter(workload), self.policy)
            return self.policy
        best = self._best(workload)
        self._plan = self._staying(self.problem(workload), best)
        return self._plan.policy

    def _best(self, workload: Workload) -> Plan:
        """The best plan for a workload; the same as before, where it was asked for before."""
        if workload not in self._known:
            self._known[workload] = self._searched(workload)
        return self._known[workload]

    def _searched(self, workload: Workload) -> Plan:
        """By the profile that is worth having for this workload."""
        plans = search(self.problem(workload))
        # Not while a model is in memory: what it takes would be neither free nor quiet.
        is_first = self._plan is None and self._backed_off == 0
        if self.profile is None and is_first and plans and plans[0].total_s > WORTH_MEASURING_S:
            self._measure()
            plans = search(self.problem(workload))
        if not plans:
            plans = [evaluate(self.problem(workload), self._fitted(workload))]
        return plans[0]

    def _measure(self) -> None:
        """Measures the machine; a disk that cannot be measured is no reason not to run."""
        try:
            self.profile = measured_profile(
                self.dtype, self.offload_dir, self.unified, self.progress
            )
        except (OSError, ValueError) as error:
            what = first_line(error)
            self.progress.say(f"flexgen-jax: planning without measuring this machine: {what}")
        self._budgets = None  # what measuring has left behind is not free
        self._known.clear()

    def _staying(self, problem: Problem, best: Plan) -> Plan:
        """The last plan's weights with new batches, where that is nearly as fast as `best`."""
        if self._plan is None or best.policy.weights == self._plan.policy.weights:
            return best
        for policy in (
            self._plan.policy,
            replace(best.policy, weights=self._plan.policy.weights),
        ):
            if not self.budgets.shortfalls(problem.peak(policy)):
                plan = evaluate(problem, policy)
                if plan.total_s <= STAY * best.total_s:
                    return plan
        return best

    def _fitted(self, workload: Workload) -> Policy:
        """Something that fits where the linear program finds nothing: its memory is an estimate."""
        fitter = self._fitter(replace(workload, num_sequences=workload.num_sequences or 1))
        found = fitter.largest_batches(self.policy)
        if found is None:
            self._check(fitter, self.policy)
        return found or self.policy

    def problem(self, workload: Workload) -> Problem:
        """The search for this model and machine."""
        return Problem(
            config=self.config,
            dtype=self.dtype,
            hw=self._known_profile(),
            budgets=self.budgets,
            unified=self.unified,
            workload=workload,
            base=self.policy,
            choices=Choices.keeping(self.policy),
        )

    def _known_profile(self) -> HardwareProfile:
        """What there is without measuring: asked for, cached, or a generic machine's."""
        if self.profile is None:
            self.profile = cached_profile(self.dtype, self.offload_dir)
        found = self.profile or known_machine("generic-cpu" if self.unified else "rtx3090-24gb")
        return replace(found, sizes=self.sizes)  # this device computes, whatever it plans with

    def predicted(self, policy: Policy, workload: Workload) -> dict[str, float | str] | None:
        """What a run was to take, by this machine's profile; None where there is none."""
        problem = self.problem(workload)
        if self.profile is None:
            return None
        plan = evaluate(problem, policy)
        return {
            "total_s": plan.total_s,
            "prefill_s": plan.prefill_s,
            "decode_s": plan.decode_s,
            "generation_throughput": plan.throughput,
            "hardware": self.profile.name,
        }

    def back_off(self, on_host: bool) -> bool:
        """After running out of memory: plans for less from now on, unless that was tried often
        enough or the policy was given. on_host: it was not the device's memory."""
        if not self.is_auto or self._backed_off == BACK_OFFS:
            return False
        self._backed_off += 1
        old = self.budgets

        def less(limit: int | None, used: int) -> int | None:
            return None if limit is None else int(BACK_OFF * min(limit, used))

        assert self._plan is not None, "an automatic run has a plan"
        used = self._plan.peak_bytes
        together = used["device"] + used["host"]
        self._budgets = Budgets(
            device=old.device if self.unified or on_host else less(old.device, used["device"]),
            host=less(old.host, used["host"]) if on_host and not self.unified else old.host,
            disk=old.disk,
            shared=less(old.shared, together),
        )
        self._plan = None
        self._known.clear()
        return True

    def spare_ram(self, policy: Policy, workload: Workload) -> int:
        """Host bytes that a run leaves free."""
        return self.budgets.spare_ram(self._fitter(workload).needed(policy))

    def _fitter(self, workload: Workload) -> Fitter:
        return Fitter(self.config, self.dtype, workload, self.budgets, self.unified, self.sizes)

    def _check(self, fitter: Fitter, policy: Policy) -> None:
        missing = self.budgets.shortfalls(fitter.needed(policy))
        if missing:
            raise BudgetError(f"the plan does not fit: {missing[0]}; {fitter.advice(policy)}")
