"""An invented hardware profile."""

from __future__ import annotations

import random

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.policy.hardware import HardwareProfile, Rate
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.costs import Costs


def machine(rng: random.Random | None = None, **changes: object) -> HardwareProfile:
    """Returns a profile of constant rates; with `rng`, random over three orders of magnitude."""

    def rate(typical: float) -> Rate:
        return Rate.constant(typical * (10 ** rng.uniform(-1.5, 1.5) if rng else 1))

    values: dict[str, object] = {
        "name": "test",
        "dtype": "float16",
        "device_memory": 0,
        "host_memory": 0,
        "disk_space": 0,
        "unified": False,
        "disk_read": rate(2e9),
        "disk_write": rate(1e9),
        "page_cache": rate(8e9),
        "host_to_device": rate(12e9),
        "device_to_host": rate(10e9),
        "linear": {bits: rate(20e12) for bits in (16, 8, 4)},
        "prefill_attention": rate(10e12),
        "device_attention": {bits: rate(100e9) for bits in (16, 8, 4)},
        "host_attention": {bits: rate(10e9) for bits in (16, 8, 4)},
        "quantize": rate(10e9),
        "device_rank": rate(1e9),
        "host_rank": rate(1e9),
        "step_s": 0.0,
        "split_s": 0.0,
    }
    return HardwareProfile(**{**values, **changes})  # type: ignore[arg-type]


def costs_of(
    config: ModelConfig,
    dtype: str,
    policy: Policy,
    hw: HardwareProfile | None = None,
    unified: bool | None = None,
) -> Costs:
    """Returns the costs of a model on a machine; unified: as the machine is, unless it is given."""
    hw = hw or machine()
    unified = hw.unified if unified is None else unified
    return Costs(Setting(config, dtype, unified, hw.sizes), policy, hw)
