"""The objects that every part of the runtime works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import HostAttention, kernels_of_device
from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.quantization import assemble
from flexgen_jax.models.checkpoint import numpy_dtype
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec import AttentionSpec, Formats, ModelSpec, model_spec
from flexgen_jax.offload.disk.folder import OffloadFolder
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.tiers import BufferPool, Memories
from flexgen_jax.offload.trace import Trace
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.policy import Tier


@dataclass(frozen=True)
class Runtime:
    """One model's hold on the machine: memories, budgets, offload folder and counters."""

    config: ModelConfig
    formats: Formats
    spec: ModelSpec
    memories: Memories
    ledger: Ledger
    metrics: Metrics
    pool: BufferPool
    watcher: Watcher
    programs: Programs
    sizes: KernelSizes
    host_attention: HostAttention
    folder: OffloadFolder | None

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        formats: Formats,
        budgets: Mapping[Tier, int | None],
        offload_dir: Path | None,
        unified: bool | None = None,
        trace: Trace | None = None,
    ) -> Runtime:
        """Creates the runtime of a model; `offload_dir` is None if the policy puts nothing on
        disk."""
        metrics, ledger, kernels = Metrics(trace), Ledger(budgets), kernels_of_device()
        watcher = Watcher(metrics)
        memories = Memories(watcher, unified)
        return cls(
            config=config,
            formats=formats,
            spec=model_spec(config),
            memories=memories,
            ledger=ledger,
            metrics=metrics,
            pool=BufferPool(memories, ledger),
            watcher=watcher,
            programs=Programs(config, formats, kernels),
            sizes=kernels.sizes,
            host_attention=HostAttention(),
            folder=OffloadFolder(offload_dir) if offload_dir is not None else None,
        )

    @property
    def numpy_dtype(self) -> np.dtype:
        """The NumPy dtype of hidden states, open KV blocks and everything that is not quantized."""
        return numpy_dtype(self.formats.dtype)

    def disk(self) -> OffloadFolder:
        assert self.folder is not None, "the policy puts something on disk"
        return self.folder

    def prepare_host(self, is_sparse: bool, keys_move: bool) -> None:
        """Compiles or loads the kernels of `host_attention` for KV blocks of this model, open and
        sealed."""
        for layer, _ in self.spec.decoder_kinds:
            self._prepare_host(layer.attention, is_sparse, keys_move)

    def _prepare_host(self, attention: AttentionSpec, is_sparse: bool, keys_move: bool) -> None:
        sealed = self.formats.kv(attention.kv_shape(1, 1))
        blocks = []
        for storage in dict.fromkeys((sealed, replace(sealed, bits=16))):
            leaves = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in storage.leaves]
            blocks.append((assemble(storage, leaves),) * 2)
        query = np.asarray(jnp.zeros(attention.query_shape(1), self.formats.dtype))
        self.host_attention.prepare(query, blocks, is_sparse, keys_move)

    def on_host(self, attend: Callable[..., Any], query: jax.Array, *args: Any) -> Any:
        """Calls a method of `host_attention` with a query that is on the device; returns its
        results on the device."""
        rows = np.asarray(self.memories.to_host(query, "attention", "queries"))
        operation = self.metrics.begin("host_compute", "attention", "attention on the host")
        try:
            found = attend(rows, *args)
        finally:
            self.metrics.end(operation)
        return self.memories.send(found, "attention", "partial results")

    def close(self) -> None:
        self.watcher.close()
        self.host_attention.close()
        if self.folder is not None:
            self.folder.close()
