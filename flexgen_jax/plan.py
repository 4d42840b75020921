"""Chooses or checks the policy of a run against what the machine has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from flexgen_jax.config import ModelConfig
from flexgen_jax.metrics import BudgetError
from flexgen_jax.offload.machine import detect_budgets
from flexgen_jax.policy.fit import Budgets, Fitter
from flexgen_jax.policy.policy import Policy, Workload

AUTO_BATCH_SIZE = 16
AUTO_NUM_BATCHES = 4


@dataclass
class Planner:
    """One model's limits, and a policy; with `is_auto` its placements and batches are replaced by
    the fastest tiers that hold everything."""

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
    _chosen: Policy | None = field(default=None, init=False)
    _budgets: Budgets | None = field(default=None, init=False)

    @property
    def budgets(self) -> Budgets:
        """Detected once, before the run itself uses memory."""
        if self._budgets is None:
            asked = (self.device_memory, self.host_memory, self.disk_space)
            self._budgets = detect_budgets(*asked, self.offload_dir, self.fingerprint, self.unified)
        return self._budgets

    @property
    def block_sequences(self) -> int:
        """Sequences in one block of the given policy, or in the largest automatic one."""
        if self.is_auto:
            return AUTO_BATCH_SIZE * AUTO_NUM_BATCHES
        return self.policy.batch_size * self.policy.num_batches

    def policy_for(self, workload: Workload) -> Policy:
        """A policy that fits, or `BudgetError` with the numbers and the nearest one that does."""
        fitter = self._fitter(workload)
        if not self.is_auto:
            self._check(fitter, self.policy)
            return self.policy
        wanted = self._auto_batches(workload)
        if self._chosen is not None:
            # Weights stay where they are as long as the new workload fits beside them.
            kept = replace(
                self._chosen, batch_size=wanted.batch_size, num_batches=wanted.num_batches
            )
            if fitter.fits(kept):
                return kept
        found = fitter.largest_batches(wanted)
        if found is None:
            self._check(fitter, wanted)
        self._chosen = found or wanted
        return self._chosen

    def spare_ram(self, policy: Policy, workload: Workload) -> int:
        """Host bytes that a run leaves free."""
        return self.budgets.spare_ram(self._fitter(workload).needed(policy))

    def _fitter(self, workload: Workload) -> Fitter:
        return Fitter(self.config, self.dtype, workload, self.budgets, self.unified)

    def _check(self, fitter: Fitter, policy: Policy) -> None:
        missing = self.budgets.shortfalls(fitter.needed(policy))
        if missing:
            raise BudgetError(f"the plan does not fit: {missing[0]}; {fitter.advice(policy)}")

    def _auto_batches(self, workload: Workload) -> Policy:
        batches = min(AUTO_NUM_BATCHES, -(-workload.num_sequences // AUTO_BATCH_SIZE))
        rows = min(AUTO_BATCH_SIZE, -(-workload.num_sequences // batches))
        return replace(self.policy, batch_size=rows, num_batches=batches)
