"""Copied experts that stay on the device for later steps."""

from __future__ import annotations

from collections import OrderedDict

from flexgen_jax.policy.parts import WeightsPart
from flexgen_jax.schedule.loads import Loader, PartLoad
from flexgen_jax.schedule.passes import Handle


class ExpertCache:
    """The experts that steps of any layer used last, up to a number of bytes.

    capacity: bytes on the device, which are reserved for the whole run; hits, misses: how many
    experts visits found here, and how many they copied.
    """

    def __init__(self, capacity: int, loader: Loader) -> None:
        self._capacity, self._loader = capacity, loader
        self._loads: OrderedDict[WeightsPart, PartLoad] = OrderedDict()
        self._bytes = 0
        self.hits = self.misses = 0

    def __contains__(self, part: WeightsPart) -> bool:
        return part in self._loads

    def take(self, part: WeightsPart) -> Handle:
        """Returns the load of an expert that is here, for a step."""
        self._loads.move_to_end(part)
        return self._loads[part].handle

    def keep(self, load: PartLoad, after: int) -> None:
        """Takes over a copied load, which step number `after` was the last to use."""
        part = load.part
        assert isinstance(part, WeightsPart), "it is an expert"
        if part.copied > self._capacity:
            self._loader.end(load, after, is_used=True)
            return
        self._loader.detach(load, after)
        while self._bytes + part.copied > self._capacity:
            oldest, old_load = self._loads.popitem(last=False)
            self._loader.drop(old_load)
            self._bytes -= oldest.copied
        self._loads[part] = load
        self._bytes += part.copied

    def close(self) -> None:
        """Frees all copies."""
        while self._loads:
            self._loader.drop(self._loads.popitem()[1])
        self._bytes = 0
