"""The compute resources of a model: compiled programs, the CPU's attention, and the memories
between which arrays move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import HostAttention, is_cpu, kernels_of_cpu, kernels_of_device
from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.quantization import Kept, assemble
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.offload.metrics import Content, Metrics
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.plan import BlockPlan


@dataclass(frozen=True)
class Device:
    """The device of a model, and the CPU that assists it."""

    spec: ModelSpec
    formats: Formats
    memories: Memories
    programs: Programs
    sizes: KernelSizes
    host_attention: HostAttention

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        formats: Formats,
        unified: bool | None = None,
        metrics: Metrics | None = None,
    ) -> Device:
        """Creates the device of a model."""
        kernels = kernels_of_device()
        formats = replace(formats, has_lanes=is_cpu())
        return cls(
            spec=model_spec(config),
            formats=formats,
            memories=Memories(Watcher(metrics or Metrics()), unified),
            programs=Programs(config, formats, kernels),
            sizes=kernels.sizes,
            host_attention=HostAttention(not is_cpu()),
        )

    @cached_property
    def host_programs(self) -> Programs:
        """The programs that the CPU runs next to the device, for weights in host memory."""
        model = self.programs.traceable
        return Programs(model.config, model.formats, kernels_of_cpu(), self.memories.cpu)

    @property
    def all_programs(self) -> tuple[Programs, ...]:
        """The programs of the device, and of the CPU next to it if there are any."""
        has_host = "host_programs" in self.__dict__  # made at their first use
        return (self.programs, self.host_programs) if has_host else (self.programs,)

    @property
    def metrics(self) -> Metrics:
        return self.memories.metrics

    def layer_programs(self, plan: BlockPlan) -> Programs:
        """Returns the programs of decoder layers: `programs`, or those for unpacked weights."""
        return self.programs.plain if plan.unpacks else self.programs

    def watch(self, content: Content, name: str, source: Any, result: Any) -> None:
        """Counts the device as busy from when `source` is there until `result`, which is already
        enqueued, is computed; see `Watcher.follow`."""
        if not self.metrics.is_timed:
            return
        operation = self.metrics.queue("compute", content, name)
        self.memories.watcher.follow(operation, source, result)

    def prepare_host(self, is_sparse: bool, keys_move: bool) -> None:
        """Compiles or loads the kernels of `host_attention` for KV blocks of this model, open and
        sealed."""
        for layer, _ in self.spec.decoder_kinds:
            if layer.attends:
                self._prepare_host(layer, is_sparse, keys_move)

    def _prepare_host(self, layer: LayerSpec, is_sparse: bool, keys_move: bool) -> None:
        blocks = [tuple(_zeros(self.formats.plain(leaf, 1)) for leaf in layer.growing)]
        if self.formats.cache_bits < 16:
            sealed = (_zeros(self.formats.sealed(leaf, 1, 1)) for leaf in layer.growing)
            blocks.append(tuple(sealed))
        attention = layer.attention
        query = np.asarray(jnp.zeros(attention.query_shape(1), self.formats.dtype))
        self.host_attention.prepare(query, blocks, attention, is_sparse, keys_move)

    def on_host(self, attend: Callable[..., Any], query: jax.Array, *args: Any) -> Any:
        """Calls a method of `host_attention` with a query that is on its way to the host; returns
        its results on the device."""
        rows = np.asarray(query)
        with self.metrics.timing("host_compute", "attention", "attention on the host"):
            attended = attend(rows, *args)
        return self.memories.send(attended, "attention", "partial results")

    def close(self) -> None:
        self.memories.watcher.close()
        self.host_attention.close()


def _zeros(storage: Storage) -> Kept:
    leaves = [jnp.zeros(leaf.shape, leaf.kind) for leaf in storage.leaves]
    zeros: Kept = assemble(storage, leaves)
    return zeros
