"""How often experts are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flexgen_jax.models.spec import LayerSpec

MAX_WAITING_SHARE = 0.75
"""Up to this share of a layer's experts, expected to be chosen, loads wait for the choice; more are
better loaded ahead."""


@dataclass(frozen=True)
class ExpertRates:
    """How often a model's tokens choose each expert of a layer.

    shares: the probability that a token chooses an expert, that of the most popular one first: the
    average over layers, whose popular experts have different numbers. Empty if nothing was
    measured: then all are expected equally often.
    """

    shares: tuple[float, ...] = ()
    # How many experts some tokens choose, as far as it was asked: every step of a run does.
    _distinct: dict[float, float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def measured(cls, counts: Mapping[int, Sequence[int]], top: int) -> ExpertRates:
        """Returns the rates of choices that were counted: of each layer, how often each expert was
        chosen; top: how many a token chooses.

            counts {1: (6, 2), 2: (1, 7)}, top 1  ->  shares (0.8125, 0.1875)
        """
        layers = [sorted(uses, reverse=True) for uses in counts.values()]
        shares = [[top * count / sum(uses) for count in uses] for uses in layers]
        return cls(tuple(sum(alike) / len(layers) for alike in zip(*shares, strict=True)))

    def chosen(self, layer: LayerSpec, rows: float) -> float:
        """Returns how many of a layer's experts are expected to be chosen by at least one of some
        tokens; 0 without experts."""
        experts = layer.experts
        if experts is None:
            return 0.0
        if len(self.shares) == experts.count:
            if rows not in self._distinct:
                unchosen: list[float] = [(1 - min(share, 1.0)) ** rows for share in self.shares]
                self._distinct[rows] = experts.count - sum(unchosen)
            return self._distinct[rows]
        missed: float = (1 - experts.top / experts.count) ** rows
        return experts.count * (1 - missed)

    def few_are_chosen(self, layer: LayerSpec, rows: float) -> bool:
        """Returns whether `tokens` tokens are expected to choose few of a layer's experts."""
        experts = layer.experts
        return experts is not None and self.chosen(layer, rows) <= MAX_WAITING_SHARE * experts.count
