"""A placed model: its weights are in their tiers, ready to run blocks of batches and report on
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from flexgen_jax.engine.planner import Planner
from flexgen_jax.machine.limits import storage_read_bytes
from flexgen_jax.models.checkpoint import WeightSource
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.context import Runtime
from flexgen_jax.offload.executor import Batch, BlockRun, OnResult
from flexgen_jax.offload.trace import Trace
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.memory import (
    BlockShape,
    buffer_bytes,
    peak_bytes,
    plan_cache,
    workspace_bytes,
)
from flexgen_jax.policy.placement import (
    CachePlan,
    page_cached,
    place_activations,
    place_weights,
    realised,
)
from flexgen_jax.policy.policy import TIERS, Policy, Tier, Workload
from flexgen_jax.policy.schedule import Step
from flexgen_jax.progress import Progress


class Session:
    """Runs blocks of batches under one placement of the weights."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        policy: Policy,
        workload: Workload,
        planner: Planner,
        source: WeightSource,
        trace: Trace | None = None,
    ) -> None:
        self.workload = workload
        self._config = config
        self._dtype, self._formats = dtype, policy.formats(dtype)
        self._planner = planner
        budgets = planner.budgets
        self._runtime = Runtime.create(
            config,
            self._formats,
            {tier: budgets.allowed(tier) for tier in TIERS},
            planner.offload_dir if policy.uses_disk else None,
            planner.unified,
            trace,
        )
        self._tiers = place_weights(self._runtime.spec, dtype, policy)
        self._weights = WeightStore(self._runtime, source, self._tiers)
        self.adopt(policy, workload)
        self._phases = {"prefill_s": 0.0, "decode_s": 0.0}
        self._storage_read: int | None = None
        self._report: dict[str, Any] = {}
        self._decode_steps = 0
        self._init_s = self._kernels_s = 0.0

    def suits(self, policy: Policy) -> bool:
        """Returns whether weights and formats already are as the policy wants them."""
        same_place = self.policy.weights == policy.weights
        has_disk = self._runtime.folder is not None or not policy.uses_disk
        return same_place and has_disk and self._formats == policy.formats(self._dtype)

    def adopt(self, policy: Policy, workload: Workload) -> None:
        """Uses a policy, which must suit this session (see `suits`), from now on."""
        self.policy = policy
        spare = self._planner.spare_ram(policy, workload)
        self._weights.cached = page_cached(self._runtime.spec, self._formats, self._tiers, spare)

    def place(self, progress: Progress) -> None:
        """Brings the weights to their tiers."""
        started = time.perf_counter()
        tensors = self._runtime.spec.tensors.values()
        total = sum(self._formats.weight(tensor).nbytes for tensor in tensors)
        with progress.placing(total) as placed:
            self._weights.place(placed)
        self._init_s = time.perf_counter() - started

    def compile(self, workload: Workload) -> None:
        """Compiles every program of a greedy run on the largest block of this workload."""
        shape = BlockShape.of(self.policy, workload)
        plan = plan_cache(self._config, self.policy, shape)
        programs = self._runtime.programs
        for batch, rows in enumerate(shape.batch_sizes):
            prompt, generated = plan.prompt[batch], plan.generated[batch]
            programs.embed(rows, workload.prompt_len)
            *others, last = self._runtime.spec.decoders
            programs.prefill(last, rows, prompt, only_last=True)
            for layer in others:
                programs.prefill(layer, rows, prompt)
            programs.head(rows, True)
            for count, tail in enumerate(generated):
                programs.embed(rows, 1)
                self._compile_decode(plan, batch, rows, len(prompt) + count)
                for layer, _ in self._runtime.spec.decoder_kinds:
                    self._compile_tail(layer, rows, tail)
        if any(plan.generated) and plan.values_stay and set(plan.homes.values()) != {"device"}:
            started = time.perf_counter()
            self._runtime.prepare_host(self.policy.is_sparse, not plan.keys_stay)
            self._kernels_s += time.perf_counter() - started

    def _compile_tail(self, layer: LayerSpec, rows: int, tail: int) -> None:
        """What writes to an open block and seals it."""
        if not self._planner.unified:
            self._runtime.programs.append(layer, rows, tail)
        if self._formats.cache_bits < 16:
            self._runtime.programs.seal(layer, rows, tail)

    def _compile_decode(self, plan: CachePlan, batch: int, rows: int, sealed: int) -> None:
        """Compiles every program that a step may need, in any layer, when `sealed` KV blocks are
        sealed."""
        programs = self._runtime.programs
        room = sum(plan.lengths(batch)[: sealed + 1])
        most = self.policy.attended(room) if self.policy.is_sparse else 0
        for index, layer in enumerate(self._runtime.spec.decoders):
            here, there = (plan.part(index, batch, sealed, on_host) for on_host in (False, True))
            if not there.starts:
                programs.decode(layer, rows, here.lengths, here.tail, most)
                continue
            programs.project(layer, rows)
            programs.finish(layer, rows, 2 if here.starts else 1)
            if here.starts and not most:
                programs.attend(layer, rows, here.lengths, here.tail)
            elif here.starts:
                programs.rank(layer, rows, here.lengths, here.tail, most)
                programs.attend_ranked(layer, rows, here.lengths, here.tail, most)
            if most and not plan.keys_stay:
                programs.rank(layer, rows, there.lengths, there.tail, most)

    def start(self) -> None:
        """Starts the measurements of a run."""
        self._runtime.metrics.reset()
        self._runtime.ledger.reset_peak()
        self._storage_read = storage_read_bytes()
        self._phases = {"prefill_s": 0.0, "decode_s": 0.0}
        self._decode_steps = 0

    def run(
        self,
        batches: Sequence[Batch],
        tokens: int,
        on_result: OnResult,
        tick: Callable[[], object],
    ) -> None:
        """Walks one block of batches through the model."""
        shape = BlockShape(
            tuple(batch.size for batch in batches),
            tuple(batch.prompt_len for batch in batches),
            tokens,
        )
        plan = plan_cache(self._config, self.policy, shape)
        last, decoded = time.perf_counter(), 0

        def on_step(step: Step) -> None:
            nonlocal last, decoded
            if step.token > decoded:
                decoded = step.token
                self._decode_steps += 1
            now = time.perf_counter()
            self._phases["decode_s" if step.token else "prefill_s"] += now - last
            last = now
            tick()

        workspace = max(
            workspace_bytes(
                self._config,
                self._formats,
                self._runtime.sizes,
                batch.size,
                batch.prompt_len,
                batch.head,
            )
            for batch in batches
        )
        block = BlockRun(
            self._runtime, self._weights, self.policy, batches, tokens, plan, on_result, on_step
        )
        self._runtime.pool.most_bytes = buffer_bytes(*self._sized(shape))
        with self._runtime.ledger.reserving("device", workspace):
            block.run()

    def finish(self, num_sequences: int, workload: Workload, num_tokens: int) -> None:
        """Ends a run's measurements and keeps the report."""
        self.workload = workload
        total = sum(self._phases.values())
        shape = BlockShape.of(self.policy, workload)
        decoded = max(num_tokens - num_sequences, 0)
        storage_read = storage_read_bytes()
        if storage_read is not None and self._storage_read is not None:
            storage_read -= self._storage_read
        prefill_s, decode_s = self._phases["prefill_s"], self._phases["decode_s"]
        self._report = {
            "policy": asdict(self.policy),
            "prompt_len": workload.prompt_len,
            "gen_len": workload.gen_len,
            "num_sequences": num_sequences,
            "num_tokens": num_tokens,
            "init_s": self._init_s,
            "compile_s": self._runtime.programs.compile_s + self._kernels_s,
            **self._phases,
            "total_s": total,
            "generation_throughput": num_tokens / total,
            "prefill_throughput": num_sequences * workload.prompt_len / max(prefill_s, 1e-9),
            "decode_throughput": decoded / decode_s if decode_s > 0 else 0.0,
            "decode_steps": self._decode_steps,
            **self._runtime.metrics.report(),
            "storage_read_bytes": storage_read,
            "peak_bytes": self._runtime.ledger.peak,
            "computed_peak_bytes": peak_bytes(*self._sized(shape)),
            "compiled_workspace_bytes": self._runtime.programs.workspace,
            "realized": self._realized(shape),
        }

    def _sized(
        self, shape: BlockShape
    ) -> tuple[ModelConfig, str, Policy, BlockShape, bool, KernelSizes]:
        """What the bytes of a block of batches depend on."""
        unified, sizes = self._planner.unified, self._runtime.sizes
        return self._config, self._dtype, self.policy, shape, unified, sizes

    def _realized(self, shape: BlockShape) -> dict[str, dict[Tier, float]]:
        """Returns the fractions of the bytes that each tier really got."""
        spec = self._runtime.spec
        tensors = [t for t in spec.tensors.values() if not t.is_small]
        weights = [self._formats.weight(t).nbytes for t in tensors]
        cache = plan_cache(self._config, self.policy, shape)
        blocks = [
            cache.lengths(key.batch)[key.block] * spec.decoders[key.layer].attention.kv_size
            for key in cache.homes
        ]
        homes = place_activations(len(spec.layers) - 1, len(shape.batch_sizes), self.policy).homes
        return {
            "weights": realised(weights, [self._tiers[t.key] for t in tensors]),
            "cache": realised(blocks, list(cache.homes.values())),
            "activations": realised([1] * len(homes), list(homes.values())),
        }

    def report(self) -> dict[str, Any]:
        return self._report

    def close(self) -> None:
        self._weights.close()
        self._runtime.close()
