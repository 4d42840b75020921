"""A placed model: its weights are in their tiers, ready to run blocks of batches and report on
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax.cpu import kernels_of_device
from flexgen_jax.engine.warm_up import warm_up
from flexgen_jax.machine.limits import storage_read_bytes
from flexgen_jax.models.weight_source import WeightSource
from flexgen_jax.offload.batch import BatchSource, Neighbours, OnResult
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.disk.kv_store import KVStore
from flexgen_jax.offload.executor import BlockRun
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.speculation import Acceptance, Drafter
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.hardware import DiskReads
from flexgen_jax.policy.placement import page_cached, place_weights, realised
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import TIERS, Policy, Tier, Workload
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.progress import Progress
from flexgen_jax.requests.batching import PromptTokens
from flexgen_jax.schedule.admission import block_of
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.running import LayerState
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.memory import peak_bytes, run_workspace


class Session:
    """Runs blocks of batches under one placement of the weights.

    acceptance: of the tokens that were guessed in the last run; chosen: how often each expert was
    chosen in it, by the layer's index, where experts were loaded when they were.
    """

    def __init__(
        self,
        setting: Setting,
        policy: Policy,
        workload: Workload,
        budgets: Budgets,
        offload_dir: Path,
        source: WeightSource,
        metrics: Metrics | None = None,
        kv_store: KVStore | None = None,
        say: Callable[[str], object] = lambda said: None,
        drafter: Drafter | None = None,
    ) -> None:
        self._drafter = drafter
        self._setting, self._formats = setting, policy.formats(setting.dtype)
        self._budgets, self._kv_store, self._say = budgets, kv_store, say
        self._device = Device.create(setting.config, self._formats, setting.unified, metrics)
        self._ledger = Ledger({tier: budgets.allowed(tier) for tier in TIERS})
        self._folder = OffloadFolder(offload_dir) if policy.uses_disk else None
        self._tiers = place_weights(self._device.spec, setting.dtype, policy)
        self._weights = WeightStore(self._device, source, self._tiers, self._ledger, self._folder)
        self.adopt(policy, workload)
        self._phases = {"prefill_s": 0.0, "decode_s": 0.0}
        self._storage_read: int | None = None
        self._report: dict[str, Any] = {}
        self._decode_steps = 0
        self._guessed: dict[str, int] = {}
        self._cached_experts: dict[str, int] = {}
        self.acceptance = Acceptance()
        self.chosen: dict[int, np.ndarray] = {}
        self._init_s = self._kernels_s = self._compiled_before_s = 0.0

    def suits(self, policy: Policy) -> bool:
        """Returns whether weights and formats already are as the policy wants them."""
        same_place = self.policy.weights == policy.weights
        has_disk = self._folder is not None or not policy.uses_disk
        return same_place and has_disk and self._formats == policy.formats(self._setting.dtype)

    def adopt(self, policy: Policy, workload: Workload) -> None:
        """Uses a policy, which must suit this session (see `suits`), from now on."""
        self.policy, self.workload = policy, workload
        self._largest = BlockPlan(self._setting, policy, BlockShape.of(policy, workload))
        self._peaks = peak_bytes(self._largest)
        spare = self._budgets.spare_ram(self._peaks)
        self._weights.cached = page_cached(self._device.spec, self._formats, self._tiers, spare)

    @property
    def plan(self) -> BlockPlan:
        """The plan of a run."""
        return self._largest

    def place(self, progress: Progress) -> None:
        """Brings the weights to their tiers."""
        started = time.perf_counter()
        tensors = self._device.spec.tensors.values()
        total = sum(self._formats.weight(tensor).nbytes for tensor in tensors)
        with progress.placing(total) as placed:
            self._weights.place(placed)
        self._init_s = time.perf_counter() - started

    def compile(self, workload: Workload) -> None:
        """Compiles every program of a greedy run on the largest block of this workload."""
        plan = BlockPlan(self._setting, self.policy, BlockShape.of(self.policy, workload))
        self._kernels_s += warm_up(self._device, plan)

    def start(self) -> None:
        """Starts the measurements of a run."""
        self._device.metrics.reset()
        self._ledger.reset_peak()
        self._storage_read = storage_read_bytes()
        self._phases = {"prefill_s": 0.0, "decode_s": 0.0}
        self._decode_steps = 0
        self._compiled_before_s = self.compile_s

    @property
    def compile_s(self) -> float:
        """Seconds of compiling so far."""
        return sum(made.compile_s for made in self._device.all_programs) + self._kernels_s

    @property
    def num_compiled(self) -> int:
        """Programs that were compiled so far, rather than found in a cache."""
        return sum(made.num_compiled for made in self._device.all_programs)

    def run(
        self,
        source: BatchSource,
        on_result: OnResult,
        tick: Callable[[], object],
        neighbours: Neighbours | None = None,
    ) -> Iterator[None]:
        """Walks the batches that arrive through the model, one step at a time.

        source: the batches; neighbours: None unless this is a stage.
        """
        last, decoded, head = time.perf_counter(), -1, self._device.spec.head.index

        def on_step(step: Step) -> None:
            nonlocal last, decoded
            if step.layer == head and step.token > 0 and step.visit > decoded:
                decoded = step.visit
                self._decode_steps += 1
            now = time.perf_counter()
            self._phases["decode_s" if step.token > 0 else "prefill_s"] += now - last
            last = now
            tick()

        block = BlockRun(
            device=self._device,
            weights=self._weights,
            plan=self._largest,
            source=source,
            ledger=self._ledger,
            folder=self._folder,
            on_result=on_result,
            on_step=on_step,
            peaks=self._peaks,
            neighbours=neighbours,
            kv_store=self._kv_store,
            say=self._say,
            drafter=self._drafter,
        )
        with self._ledger.reserving("device", run_workspace(self._largest)):
            yield from block.run()
        self._guessed, self._cached_experts = block.guessed, block.cached_experts
        self.acceptance, self.chosen = block.acceptance, block.chosen_experts

    def finish(self, num_sequences: int, num_tokens: int, prompts: PromptTokens) -> None:
        """Ends a run's measurements and keeps the report."""
        workload = self.workload
        total = sum(self._phases.values())
        decoded = max(num_tokens - num_sequences, 0)
        storage_read = storage_read_bytes()
        if storage_read is not None and self._storage_read is not None:
            storage_read -= self._storage_read
        prefill_s, decode_s = self._phases["prefill_s"], self._phases["decode_s"]
        self._report = {
            "policy": asdict(self.policy),
            "kernels": kernels_of_device().in_words,
            "prompt_len": workload.prompt_len,
            "gen_len": workload.gen_len,
            "num_sequences": num_sequences,
            "num_tokens": num_tokens,
            "prompt_tokens": prompts.computed,
            "shared_prompt_tokens": prompts.shared,
            "stored_prompt_tokens": prompts.stored,
            "padded_prompt_tokens": prompts.padded,
            "init_s": self._init_s,
            "compile_s": self.compile_s,
            "compile_in_run_s": self.compile_s - self._compiled_before_s,
            **self._phases,
            "total_s": total,
            "generation_throughput": num_tokens / max(total, 1e-9),
            "prefill_throughput": num_sequences * workload.prompt_len / max(prefill_s, 1e-9),
            "decode_throughput": decoded / decode_s if decode_s > 0 else 0.0,
            "decode_steps": self._decode_steps,
            **self._device.metrics.report(),
            "guessed_experts": self._guessed,
            "cached_experts": self._cached_experts,
            "drafts": asdict(self.acceptance),
            "tokens_a_pass": self.acceptance.tokens_a_pass,
            "storage_read_bytes": storage_read,
            "peak_bytes": self._ledger.peak,
            "device_peak_bytes": self._device.memories.device_peak_bytes(),
            "computed_peak_bytes": self._peaks,
            "compiled_workspace_bytes": self._device.programs.workspace,
            "realized": self._realized(),
        }

    @property
    def seconds(self) -> float:
        """The seconds of the last run without compiling."""
        compiled_s: float = self._report["compile_in_run_s"]
        return sum(self._phases.values()) - compiled_s

    def disk_reads(self) -> tuple[list[DiskReads], float]:
        """Returns the direct reads of the last run, and the seconds during which at least one was
        under way; none if they waited for compute most of the time, if nothing was computed
        meanwhile, or if the page cache served some of them, as for hidden states."""
        report, busy_s = self._report, self._report["busy_s"]["disk_read"]
        nbytes, stored = report["bytes"]["disk_read"], report["storage_read_bytes"]
        is_cached = bool(self._weights.cached) or (stored is not None and stored < 0.9 * nbytes)
        is_cached = is_cached or self.policy.activations.disk > 0
        if is_cached or not self.policy.overlap or busy_s < report["total_s"] / 2:
            return [], busy_s
        layouts = [
            layout for parts in self._largest.parts for part in parts for layout in part.layouts
        ]
        blocks = [
            sizes.sealed
            for state in self._states()
            for sizes, home in zip(state.sizes, state.homes, strict=True)
            if home == "disk"
        ]
        sizes = {
            "weights": max((layout.nbytes for layout in layouts), default=0),
            "cache": max(blocks, default=0),
        }
        reads = [
            DiskReads(row["bytes"], sizes[row["content"]], row["phase"] == "prefill")
            for row in report["breakdown"]
            if row["resource"] == "disk_read" and sizes.get(row["content"])
        ]
        return reads, busy_s

    def _states(self) -> list[LayerState]:
        """All layers' states for the batches of the largest block."""
        return [state for running in block_of(self._largest) for state in running.layers]

    def _realized(self) -> dict[str, dict[Tier, float]]:
        """Returns the fractions of the bytes that each tier really got."""
        spec, batches = self._device.spec, block_of(self._largest)
        tensors = [tensor for tensor in spec.tensors.values() if not tensor.is_small]
        weights = [self._formats.weight(tensor).nbytes for tensor in tensors]
        sizes, homes = list[int](), list[Tier]()
        for state in self._states():
            if state.layer.growing:
                sizes += [tokens * state.layer.row_size for tokens in state.running.lengths]
                homes += state.homes
            if state.layer.replaced:
                sizes.append(state.layer.state_size)
                homes.append(state.replaced_home)
        hidden = [home for running in batches for home in running.hidden_homes]
        decoded = [
            running.hidden_part(1, layer).home
            for running in batches
            for layer in range(len(running.hidden_homes))
        ]
        return {
            "weights": realised(weights, [self._tiers[tensor.key] for tensor in tensors]),
            "cache": realised(sizes, homes),
            "activations": realised([1] * len(hidden), hidden),
            "activations_of_one_token": realised([1] * len(decoded), decoded),
        }

    def report(self) -> dict[str, Any]:
        return self._report

    def close(self) -> None:
        self._weights.close()
        self._device.close()
        if self._folder is not None:
            self._folder.close()
