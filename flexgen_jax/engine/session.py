"""A placed model: its weights are in their tiers, ready to run blocks of batches and report on
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.sampling import Choice
from flexgen_jax.machine.limits import storage_read_bytes
from flexgen_jax.models.checkpoint import WeightSource
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.executor import BlockRun, Neighbours, OnResult, Source
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.fit import Budgets
from flexgen_jax.policy.hardware import DiskReads
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.memory import peak_bytes, plan_workspace
from flexgen_jax.policy.placement import (
    CacheKey,
    page_cached,
    place_weights,
    realised,
)
from flexgen_jax.policy.plan import BlockPlan, BlockShape
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
        budgets: Budgets,
        offload_dir: Path,
        unified: bool,
        source: WeightSource,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._dtype, self._formats = dtype, policy.formats(dtype)
        self._budgets, self._unified = budgets, unified
        self._device = Device.create(config, self._formats, unified, metrics)
        self._ledger = Ledger({tier: budgets.allowed(tier) for tier in TIERS})
        self._folder = OffloadFolder(offload_dir) if policy.uses_disk else None
        self._tiers = place_weights(self._device.spec, dtype, policy)
        self._weights = WeightStore(self._device, source, self._tiers, self._ledger, self._folder)
        self.adopt(policy, workload)
        self._phases = {"prefill_s": 0.0, "decode_s": 0.0}
        self._storage_read: int | None = None
        self._report: dict[str, Any] = {}
        self._decode_steps = 0
        self._guessed: dict[str, int] = {}
        self._init_s = self._kernels_s = self._compiled_before_s = 0.0

    def suits(self, policy: Policy) -> bool:
        """Returns whether weights and formats already are as the policy wants them."""
        same_place = self.policy.weights == policy.weights
        has_disk = self._folder is not None or not policy.uses_disk
        return same_place and has_disk and self._formats == policy.formats(self._dtype)

    def adopt(self, policy: Policy, workload: Workload) -> None:
        """Uses a policy, which must suit this session (see `suits`), from now on."""
        self.policy, self.workload = policy, workload
        self._largest = self._plan(BlockShape.of(policy, workload))
        self._peaks = peak_bytes(self._largest)
        spare = self._budgets.spare_ram(self._peaks)
        self._weights.cached = page_cached(self._device.spec, self._formats, self._tiers, spare)

    def open_plan(self) -> BlockPlan:
        """Returns the plan of a run, which no batch has entered yet."""
        return self._largest.emptied()

    def _plan(self, shape: BlockShape) -> BlockPlan:
        sizes = self._device.sizes
        return BlockPlan(self._config, self._dtype, self.policy, shape, self._unified, sizes)

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
        shape = BlockShape.of(self.policy, workload)
        plan = self._plan(shape)
        cache = plan.cache
        programs = self._device.programs
        for layer, _ in self._device.spec.decoder_kinds if plan.unpacks else ():
            programs.unpack(layer)
        for batch, rows in enumerate(shape.batch_sizes):
            prompt, generated = cache.prompt[batch], cache.generated[batch]
            self._compile_prefill(plan, batch, rows)
            if self._config.has_head:
                programs.head(rows, Choice(is_greedy=True))
            for count, tail in enumerate(generated):
                if self._config.has_embedding:
                    programs.embed(rows, 1)
                self._compile_decode(plan, batch, rows, len(prompt) + count)
                for layer, _ in self._device.spec.decoder_kinds:
                    if self._formats.cache_bits < 16:
                        programs.seal(layer, rows, tail)
        if (
            any(cache.generated.values())
            and cache.values_stay
            and set(cache.homes.values()) != {"device"}
        ):
            started = time.perf_counter()
            self._device.prepare_host(self.policy.is_sparse, not cache.keys_stay)
            self._kernels_s += time.perf_counter() - started

    def _compile_prefill(self, plan: BlockPlan, batch: int, rows: int) -> None:
        """Compiles every program of a batch's prompts."""
        programs, layered = self._device.programs, self._device.layer_programs(plan)
        blocks, chunks = plan.cache.prompt[batch], plan.chunks(plan.batches[batch])
        *others, last = self._device.spec.decoders
        has_head = self._config.has_head
        for tokens in set(chunks) if self._config.has_embedding else ():
            programs.embed(rows, tokens)
        for layer in (*others, last):
            is_last = layer is last and has_head
            for tokens in {1} if is_last else set(chunks):
                self._compile_experts(layered, layer, rows, tokens)
            first = blocks if len(chunks) == 1 else blocks[:1]
            layered.prefill(layer, rows, first, only_last=is_last)
            for tokens in set(chunks[1:]):
                asked = 1 if is_last else tokens
                layered.project_chunk(layer, rows, tokens, asked)
                layered.finish_chunk(layer, rows, tokens, asked, 1)
                for earlier in set(chunks[:-1]):
                    layered.attend_chunk(layer, rows, asked, earlier)

    def _compile_decode(self, plan: BlockPlan, batch: int, rows: int, sealed: int) -> None:
        """Compiles every program that a step may need, in any layer, when `sealed` KV blocks are
        sealed."""
        programs, layered = self._device.programs, self._device.layer_programs(plan)
        cache = plan.cache
        room = sum(cache.lengths(batch)[: sealed + 1])
        most = self.policy.attended(room) if self.policy.is_sparse else 0
        for index, layer in enumerate(self._device.spec.decoders):
            self._compile_experts(layered, layer, rows, 1)
            here, there = (cache.part(index, batch, sealed, on_host) for on_host in (False, True))
            if not there.starts:
                appends = plan.appends(CacheKey(index, batch, sealed))
                layered.decode(layer, rows, here.lengths, here.tail, most, appends)
                continue
            layered.project(layer, rows)
            layered.finish(layer, rows, 2 if here.starts else 1)
            if here.tail and not self._unified:
                programs.append(layer, rows, here.tail)
            if here.starts and not most:
                programs.attend(layer, rows, here.lengths, here.tail)
            elif here.starts:
                programs.rank(layer, rows, here.lengths, here.tail, most)
                programs.attend_ranked(layer, rows, here.lengths, here.tail, most)
            if most and not cache.keys_stay:
                programs.rank(layer, rows, there.lengths, there.tail, most)

    def _compile_experts(self, layered: Programs, layer: LayerSpec, rows: int, tokens: int) -> None:
        """Compiles what a layer's experts compute of `tokens` tokens of each row."""
        if layer.experts is None:
            return
        layered.route(layer, rows, tokens)
        layered.expert(layer, rows * tokens)
        layered.combine(rows, tokens)
        if tokens == 1:
            layered.guess(layer, rows)

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
        return self._device.programs.compile_s + self._kernels_s

    def run(
        self,
        plan: BlockPlan,
        source: Source,
        on_result: OnResult,
        tick: Callable[[], object],
        neighbours: Neighbours | None = None,
    ) -> Iterator[None]:
        """Walks the batches that arrive through the model, one step at a time.

        plan: from `open_plan`; source: the batches; neighbours: None unless this is a stage.
        """
        last, decoded, head = time.perf_counter(), -1, len(plan.spec.layers) - 1

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
            self._device,
            self._weights,
            plan,
            source,
            self._ledger,
            self._folder,
            on_result,
            on_step,
            self._peaks,
            neighbours,
        )
        with self._ledger.reserving("device", plan_workspace(self._largest)):
            yield from block.run()
        self._guessed = block.guessed

    def finish(self, num_sequences: int, num_tokens: int, padding: tuple[int, int]) -> None:
        """Ends a run's measurements and keeps the report. padding: the prompts' tokens, without and
        with those that fill up batches."""
        workload = self.workload
        total = sum(self._phases.values())
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
            "prompt_tokens": padding[0],
            "padded_prompt_tokens": padding[1],
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
            "storage_read_bytes": storage_read,
            "peak_bytes": self._ledger.peak,
            "device_peak_bytes": self._device.memories.device_peak_bytes(),
            "computed_peak_bytes": self._peaks,
            "compiled_workspace_bytes": self._device.programs.workspace,
            "realized": self._realized(),
        }

    def disk_reads(self) -> tuple[list[DiskReads], float]:
        """Returns the direct reads of the last run, and the seconds during which at least one was
        under way; none if they waited for computing most of the time, if nothing was computed
        beside them, or if some were served from the page cache, as hidden states are."""
        report, busy_s = self._report, self._report["busy_s"]["disk_read"]
        nbytes, stored = report["bytes"]["disk_read"], report["storage_read_bytes"]
        is_cached = bool(self._weights.cached) or (stored is not None and stored < 0.9 * nbytes)
        is_cached = is_cached or self.policy.activations.disk > 0
        if is_cached or not self.policy.overlap or busy_s < report["total_s"] / 2:
            return [], busy_s
        plan = self._largest
        layouts = [layout for parts in plan.parts for part in parts for layout in part.layouts]
        blocks = [key for key, home in plan.cache.homes.items() if home == "disk"]
        sizes = {
            "weights": max((layout.nbytes for layout in layouts), default=0),
            "cache": max(map(plan.kv_bytes, blocks), default=0),
        }
        reads = [
            DiskReads(row["bytes"], sizes[row["content"]], row["phase"] == "prefill")
            for row in report["breakdown"]
            if row["resource"] == "disk_read" and sizes.get(row["content"])
        ]
        return reads, busy_s

    def _realized(self) -> dict[str, dict[Tier, float]]:
        """Returns the fractions of the bytes that each tier really got."""
        spec = self._device.spec
        tensors = [t for t in spec.tensors.values() if not t.is_small]
        weights = [self._formats.weight(t).nbytes for t in tensors]
        plan = self._largest
        cache, homes = plan.cache, plan.waiting.homes
        decoded = [plan.hidden(1, layer, batch).home for layer, batch in homes]
        blocks = [
            cache.lengths(key.batch)[key.block] * spec.decoders[key.layer].attention.kv_size
            for key in cache.homes
        ]
        return {
            "weights": realised(weights, [self._tiers[t.key] for t in tensors]),
            "cache": realised(blocks, list(cache.homes.values())),
            "activations": realised([1] * len(homes), list(homes.values())),
            "activations_of_one_token": realised([1] * len(homes), decoded),
        }

    def report(self) -> dict[str, Any]:
        return self._report

    def close(self) -> None:
        self._weights.close()
        self._device.close()
        if self._folder is not None:
            self._folder.close()
