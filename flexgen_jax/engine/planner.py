"""Chooses a run's policy, or checks a given policy, for this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexgen_jax.engine.drafting import Drafting
from flexgen_jax.engine.prediction import predicted_time
from flexgen_jax.errors import first_line
from flexgen_jax.machine.limits import check_folder, detect_budgets
from flexgen_jax.machine.profiles import (
    assumed_profile,
    known_profile,
    record_disk_reads,
    record_products,
)
from flexgen_jax.offload.disk.kv_pieces import PieceLayout
from flexgen_jax.policy.hardware import DiskReads, HardwareProfile
from flexgen_jax.policy.machines import generic_machine
from flexgen_jax.policy.policy import SCORE, Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.progress import Progress
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.ledger import BudgetError
from flexgen_jax.search.fit import Budgets, Fitter
from flexgen_jax.search.problem import Choices, Plan, Problem
from flexgen_jax.search.search import evaluate, search
from flexgen_jax.search.simulate import Prediction

MIN_PROBED_RUN_S = 60.0
"""A run with fewer predicted seconds than this is planned for a generic machine."""

TELLING_S = 20.0
"""Least seconds of a run that corrects later plans."""

STAY = 1.25
"""Weights stay where they are as long as the run takes at most this many times the best plan's
time."""

BACK_OFF, BACK_OFFS = 0.8, 5
"""After running out of memory, plans use this fraction of the budget; and how often that is
repeated."""

SAMPLE_TOKENS = 256
"""Prompt length for estimating the time of one token."""

SHARING_PROGRAMS = 2
"""The fixed time of a layer's decode step that sharing a prefix adds, in that of a step: attention
to the prefix and to a row's own cache are then programs of their own."""


@dataclass
class Planner:
    """The limits and the policy of one model; with `is_auto`, placements and batches are searched.

    write_limit: bytes that may be written to the disk a day, None for no limit; profile: of the
    machine to plan for; None is this machine's, measured if it is worth it.
    """

    setting: Setting
    policy: Policy
    is_auto: bool
    device_memory: int | None
    host_memory: int | None
    disk_space: int | None
    offload_dir: Path
    fingerprint: str
    progress: Progress
    write_limit: int | None = None
    profile: HardwareProfile | None = None
    drafting: Drafting | None = None
    _plan: Plan | None = field(default=None, init=False)
    _budgets: Budgets | None = field(default=None, init=False)
    _backed_off: int = field(default=0, init=False)
    _known: dict[Workload, Plan] = field(default_factory=dict, init=False)
    _is_here: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_here = self.profile is None

    @property
    def budgets(self) -> Budgets:
        """The budgets, detected once, before the run itself uses memory."""
        if self._budgets is None:
            self._budgets = detect_budgets(
                device_memory=self.device_memory,
                host_memory=self.host_memory,
                disk_space=self.disk_space,
                offload_dir=self.offload_dir,
                fingerprint=self.fingerprint,
                unified=self.setting.unified,
                say=self.progress.say,
            )
        return self._budgets

    def block_sequences(self, prompt_len: int, gen_len: int) -> int:
        """Returns the sequences in one block of the given policy, or of the best one if it is
        searched."""
        if not self.is_auto:
            return self.policy.batch_size * self.policy.num_batches
        return self._best(Workload(prompt_len, gen_len, 0)).block_sequences

    def policy_for(self, workload: Workload) -> Policy:
        """Returns a policy that fits; raises `BudgetError` with the numbers and the nearest policy
        that fits."""
        if not self.is_auto:
            policy = self._base(workload)
            self._check(self._fitter(workload), policy)
            if self.write_limit is not None:
                problem = self.problem(workload)
                _check_writes(problem, evaluate(problem, policy))
            return policy
        best = self._best(workload)
        self._plan = self._staying(self.problem(workload), best)
        return self._plan.policy

    def _best(self, workload: Workload) -> Plan:
        """Returns the best plan for a workload; each workload is searched once."""
        if workload not in self._known:
            self._known[workload] = self._searched(workload)
        return self._known[workload]

    def _searched(self, workload: Workload) -> Plan:
        """Searches the best plan for a workload, after probing the machine for some seconds if a
        long run is predicted."""
        plans = search(self.problem(workload))
        # Not while a model is in memory, because the machine would be neither free nor quiet.
        is_first = self._plan is None and self._backed_off == 0
        if self.profile is None and is_first and plans and plans[0].total_s > MIN_PROBED_RUN_S:
            self._probe()
            plans = search(self.problem(workload))
        if not plans:
            problem = self.problem(workload)
            plans = [evaluate(problem, self._fitted(workload))]
            _check_writes(problem, plans[0])
        return plans[0]

    def _probe(self) -> None:
        """Probes the machine. A failed probe does not stop the run."""
        try:
            self.profile = assumed_profile(
                self.setting.dtype, self.offload_dir, self.setting.unified, self.progress
            )
        except (OSError, ValueError, RuntimeError) as error:
            error_text = first_line(error)
            self.progress.say(f"flexgen-jax: planning for a generic machine: {error_text}")
        self._known.clear()

    def _staying(self, problem: Problem, best: Plan) -> Plan:
        """Returns a plan that leaves the weights where the last plan put them, if it is nearly as
        fast as `best`; else `best`."""
        if self._plan is None or best.policy.weights == self._plan.policy.weights:
            return best
        for policy in (
            self._plan.policy,
            replace(best.policy, weights=self._plan.policy.weights),
        ):
            if not self.budgets.shortfalls(problem.peak(policy)):
                plan = evaluate(problem, policy)
                if problem.is_met(plan) and plan.total_s <= STAY * best.total_s:
                    return plan
        return best

    def _fitted(self, workload: Workload) -> Policy:
        """Returns a policy that fits where the linear program, whose memory is an estimate, finds
        none."""
        fitter = self._fitter(replace(workload, num_sequences=workload.num_sequences or 1))
        base = self._base(workload)
        policy = fitter.largest_batches(base)
        if policy is None:
            self._check(fitter, base)
        return policy or base

    def _base(self, workload: Workload) -> Policy:
        """Returns the requested policy, without drafts for scoring."""
        return replace(self.policy, draft_tokens=0) if workload.head == SCORE else self.policy

    def problem(self, workload: Workload) -> Problem:
        """Returns the search problem for this model, machine and workload."""
        base = self._base(workload)
        return Problem(
            setting=self.planned_setting,
            hw=self._known_profile(),
            budgets=self.budgets,
            workload=workload,
            base=base,
            choices=Choices.keeping(base),
            write_limit=self.write_limit,
        )

    @property
    def planned_setting(self) -> Setting:
        """The setting with the expected acceptance rate."""
        if self.drafting is None:
            return self.setting
        return replace(self.setting, drafts=self.drafting.rates(self._known_profile()))

    def _known_profile(self) -> HardwareProfile:
        """Returns the best profile known without probing: the given one, a cached one, or a generic
        machine's."""
        if self.profile is None:
            self.profile = known_profile(self.setting.dtype, self.offload_dir)
        return self.profile or generic_machine(self.setting.unified)

    def predicted(
        self, policy: Policy, workload: Workload, texts: Mapping[EncodedRequest, int] | None
    ) -> dict[str, float | str] | None:
        """Returns the predicted times of a run by this machine's profile; None if there is no
        profile, or if the run was too long.

        texts: the tokens of each text, empty for those of the workload, None if there are too many.
        """
        problem = self.problem(workload)
        if self.profile is None or texts is None:
            return None
        plan: Plan | Prediction | None = None
        if all(tokens == workload.gen_len for tokens in texts.values()):
            plan = evaluate(problem, policy)
            tokens = problem.workload.num_sequences * workload.typical.tokens_each
        else:
            plan = predicted_time(problem, policy, texts)
            tokens = sum(texts.values())
        if plan is None:
            return None
        return {
            "total_s": plan.total_s,
            "prefill_s": plan.prefill_s,
            "decode_s": plan.decode_s,
            "generation_throughput": tokens / plan.total_s,
            "hardware": self.profile.name,
        }

    @property
    def machine(self) -> str:
        """The profile that plans are made for, in words."""
        return self._known_profile().in_words

    def observe(self, reads: Sequence[DiskReads], busy_s: float) -> None:
        """Keeps how fast a run's direct reads were, for later plans for this machine."""
        if self._is_here and reads:
            record_disk_reads(self.setting.dtype, self.offload_dir, reads, busy_s)

    def observe_seconds(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Keeps how fast a run was, for later plans, if it was what was planned for an assumed
        machine, and bound by computing."""
        plan, profile = self._plan, self.profile
        if not self._is_here or plan is None or profile is None or seconds < TELLING_S:
            return
        is_planned = num_sequences == plan.num_sequences and any(
            known_policy is plan and num_tokens == num_sequences * workload.gen_len
            for workload, known_policy in self._known.items()
        )
        if is_planned and profile.is_assumed and plan.binding == "compute":
            record_products(self.setting.dtype, self.offload_dir, plan.total_s / seconds)

    def is_worth_sharing(self, saved: int, requests: Sequence[EncodedRequest]) -> bool:
        """Returns whether computing `saved` tokens takes longer, by the machine's profile, than
        what sharing adds to decoding: `SHARING_PROGRAMS` for each token of a batch and layer."""
        longest = max(request.max_tokens for request in requests)
        costs = self.problem(Workload(SAMPLE_TOKENS, longest)).costs(self.policy)
        computed = saved * costs.mean_prefill_s(1, SAMPLE_TOKENS, False) / SAMPLE_TOKENS
        tokens = sum(request.max_tokens for request in requests)
        steps = max(longest, tokens / self.policy.batch_size)
        return bool(computed > steps * SHARING_PROGRAMS * costs.hw.step_s)

    def is_worth_loading(self, tokens: int, layout: PieceLayout) -> bool:
        """Returns whether loading the KV cache of `tokens` tokens is faster than computing it: by
        the profile of the machine, from its disk, and to its device.

        Computing also takes the time of the weights' way to the device, if they have one, which is
        not counted."""
        if not tokens:
            return False
        costs = self.problem(Workload(tokens, 1)).costs(self.policy)
        nbytes = layout.sequence_bytes(tokens)
        computed = len(costs.spec.decoders) * costs.mean_prefill_s(1, tokens, False)
        loaded = costs.hw.disk_read.seconds(nbytes)
        loaded += 0.0 if self.setting.unified else nbytes / costs.hw.host_to_device.at(nbytes)
        return loaded < computed

    def back_off(self, on_host: bool) -> bool:
        """Plans for less memory from now on, after an out-of-memory error.

        on_host: it was not the device's memory. Returns false if that was done `BACK_OFFS` times
        already, or if the policy was given.
        """
        if not self.is_auto or self._backed_off == BACK_OFFS:
            return False
        self._backed_off += 1
        old_budgets, unified = self.budgets, self.setting.unified

        def less(limit: int | None, nbytes: int) -> int | None:
            return None if limit is None else int(BACK_OFF * min(limit, nbytes))

        assert self._plan is not None, "an automatic run has a plan"
        used = self._plan.peak_bytes
        together = used["device"] + used["host"]
        self._budgets = Budgets(
            device=old_budgets.device
            if unified or on_host
            else less(old_budgets.device, used["device"]),
            host=less(old_budgets.host, used["host"])
            if on_host and not unified
            else old_budgets.host,
            disk=old_budgets.disk,
            shared=less(old_budgets.shared, together),
        )
        self._plan = None
        self._known.clear()
        return True

    def _fitter(self, workload: Workload) -> Fitter:
        return Fitter(self.planned_setting, workload, self.budgets)

    def _check(self, fitter: Fitter, policy: Policy) -> None:
        missing = self.budgets.shortfalls(fitter.needed(policy))
        if missing:
            if policy.uses_disk:
                check_folder(self.offload_dir)
            raise BudgetError(f"the plan does not fit: {missing[0]}; {fitter.advice(policy)}")


def _check_writes(problem: Problem, plan: Plan) -> None:
    excess = problem.excess_writes(plan)
    if excess is not None:
        raise BudgetError(excess)
