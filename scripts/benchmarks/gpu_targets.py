"""GPUs to compile for without having them: XLA accepts a card's description instead of the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from flexgen_jax.gpu import DeviceKernels, kernels_of_gpu

KIB = 1 << 10


@dataclass(frozen=True)
class Card:
    """A GPU as its maker describes it.

    kind: the name that CUDA has for it; capability: of computing; cores: multiprocessors; lanes:
    fp32 units of each; threads: that each holds; clock: GHz; memory, bandwidth, cache: bytes,
    byte/s, and bytes of the second-level cache; shared: KiB of shared memory of a multiprocessor,
    and that a block may ask for.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    threads: int
    clock: float
    memory: float
    bandwidth: float
    cache: int
    shared: tuple[int, int]

    @property
    def kernels(self) -> DeviceKernels:
        """The kernels that runs on this card take."""
        major, minor = self.capability
        card = SimpleNamespace(device_kind=self.kind, compute_capability=f"{major}.{minor}")
        return kernels_of_gpu(card)  # type: ignore[arg-type]

    def description(self) -> str:
        """Returns a `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        most, asked = self.shared
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: {48 * KIB}
              shared_memory_per_core: {most * KIB} shared_memory_per_block_optin: {asked * KIB}
              threads_per_core_limit: {self.threads} core_count: {self.cores}
              fpus_per_core: {self.lanes} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
              block_dim_limit_z: 65535 memory_bandwidth: {int(self.bandwidth)}
              l2_cache_size: {self.cache << 20} clock_rate_ghz: {self.clock}
              device_memory_size: {int(self.memory)}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 12 minor: 8 }} device_description_str: "{self.kind}"
            """


CARDS = {
    "t4": Card("Tesla T4", (7, 5), 40, 64, 1024, 1.59, 15.8e9, 320e9, 4, (64, 64)),
    "a100": Card(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 1.41, 85.9e9, 2039e9, 40, (164, 163)
    ),
    "l4": Card("NVIDIA L4", (8, 9), 58, 128, 1536, 2.04, 24e9, 300e9, 48, (100, 99)),
    "rtx4090": Card(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 2.52, 25.3e9, 1008e9, 72, (100, 99)
    ),
    "h100": Card(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 1.98, 85e9, 3352e9, 50, (228, 227)
    ),
    "h200": Card("NVIDIA H200", (9, 0), 132, 128, 2048, 1.98, 150.7e9, 4800e9, 60, (228, 227)),
}
"""By name, from data sheets."""


@lru_cache
def _sharding(card: Card) -> NamedSharding:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=card.description()
    )
    return NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())


def compile_for(
    card: Card,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donated: tuple[int, ...],
    options: dict[str, str | bool] | None,
) -> jax.stages.Compiled:
    """Compiles a function of abstract arguments for a card; options: XLA's."""
    sharding = _sharding(card)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    device = AbstractDevice(device_kind=card.kind, num_cores=card.cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):  # which tells Pallas the target
        lowered = jax.jit(function, donate_argnums=donated).lower(*placed)
        return lowered.compile(compiler_options=options)
