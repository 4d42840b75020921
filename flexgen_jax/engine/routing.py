"""Keeps how often a model's experts were chosen, for later plans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flexgen_jax.caches import cache_folder, read_cached, write_cached
from flexgen_jax.errors import UserError
from flexgen_jax.models.checkpoint import Checkpoint
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.loading import Model
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.weight_source import WeightSource, digest
from flexgen_jax.policy.expert_rates import ExpertRates

TELLING = 64
"""Mean choices per expert from which counts are used as frequencies: with
fewer, chance makes some look popular."""

MAX_MEAN_CHOICES = 8192
"""Mean choices per expert of earlier runs that are kept next to a new run's."""

Counts = dict[int, np.ndarray]
"""How often each expert was chosen, by the layer's index."""


class MeasuredRouting:
    """How often the experts of a model were chosen in runs on this machine.

    rates: the earlier counts. What a run adds counts from the next start on, so that
    all plans of a process agree.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, dtype: str) -> None:
        key = digest("routing", source.fingerprint(dtype))
        self._memory = cache_folder("routing") / f"{key[:32]}.json"
        layers = model_spec(config).decoders
        self._experts = {layer.index: layer.experts for layer in layers if layer.experts}
        self.rates = self._rates(self._read())

    def _rates(self, counts: Counts) -> ExpertRates:
        telling = {
            layer: layer_counts.tolist()
            for layer, layer_counts in counts.items()
            if layer_counts.sum() >= TELLING * layer_counts.size
        }
        sizes = {(self._experts[layer].count, self._experts[layer].top) for layer in telling}
        if len(sizes) != 1:
            return ExpertRates()
        return ExpertRates.measured(telling, top=sizes.pop()[1])

    def _read(self) -> Counts:
        """Returns the counts of earlier runs."""
        cached = read_cached(self._memory) or {}
        return {
            int(layer): np.array(layer_counts, np.int64) for layer, layer_counts in cached.items()
        }

    def observe(self, counts: Mapping[int, np.ndarray]) -> None:
        """Stores a run's counts, by layer index."""
        if not counts:
            return
        stored_counts = self._read()
        for layer, layer_counts in counts.items():
            before = stored_counts.get(layer, np.zeros_like(layer_counts))
            excess = before.sum() / (MAX_MEAN_CHOICES * before.size)
            stored_counts[layer] = (before // max(1.0, excess)).astype(np.int64) + layer_counts
        write_cached(self._memory, {str(layer): x.tolist() for layer, x in stored_counts.items()})


def measured_routing(
    source: WeightSource, config: ModelConfig, dtype: str
) -> MeasuredRouting | None:
    """Returns how often a model's experts were chosen; None for one without experts."""
    return MeasuredRouting(source, config, dtype) if config.has_experts else None


def planned_expert_rates(
    name: str | Path | Model | None, config: ModelConfig, dtype: str
) -> ExpertRates:
    """Returns how often a model's experts are chosen, for a plan: nothing is known of one whose
    weights are not here. name: as for `open_model`."""
    if not config.has_experts or name is None:
        return ExpertRates()
    if isinstance(name, Model):
        return MeasuredRouting(name.source, config, dtype).rates
    path = Path(name).expanduser()
    if not path.exists():
        return ExpertRates()
    try:
        source = Checkpoint(path)
    except UserError:
        return ExpertRates()  # a folder with a config alone
    return MeasuredRouting(source, config, dtype).rates
