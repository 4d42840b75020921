"""A model's parameters as a pytree of layers, on the device, the host and the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.models.folder import weight_files
from flexgen_jax.models.tensors import SafeTensors
from flexgen_jax.offloading.tiered import TieredArrays
from flexgen_jax.policy.policy import Placement


class TieredParams(TieredArrays):
    """A model's layers, placed when it is made; see `TieredArrays`.

    layers: pytrees by name, or an iterator of pairs of a name and a pytree, so that few are in
        memory: the current pytree, and two that wait for the disk.
    stored_as: a name for the part on disk, which is then kept: a later process with the same name
        reuses it, regardless of `layers`, and writes missing layers. So name what it holds, such as
        "my-model-step-1000". Files appear whole or not at all, and are compared with their
        checksums. Such layers cannot be replaced.
    """

    def __init__(
        self,
        layers: Mapping[str, Any] | Iterable[tuple[str, Any]],
        placement: Placement,
        *,
        stored_as: str | None = None,
        folder: str | Path | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk_space: str | int | None = None,
        unified: bool | None = None,
    ) -> None:
        super().__init__(
            placement,
            folder=folder,
            device_memory=device_memory,
            host_memory=host_memory,
            disk_space=disk_space,
            unified=unified,
        )
        self._trees.stored_as = stored_as
        try:
            with nullcontext() if stored_as is None else self._trees.folder().locked():
                for name, tree in layers.items() if isinstance(layers, Mapping) else layers:
                    if name in self:
                        raise UserError(f"two layers are named {name!r}")
                    super().put(name, tree)
                while self._trees.settle():
                    pass
            for name, entry in self._trees.entries.items():
                if entry.failure is not None:
                    raise UserError(f"{name} could not be written: {entry.failure}")
        except BaseException:
            self.close()
            raise

    def put(self, name: str, tree: Any) -> None:
        """Replaces a layer, see `TieredArrays.put`."""
        if (stored_as := self._trees.stored_as) is not None:
            raise UserError(f"layers stored as {stored_as!r} cannot be replaced")
        self._entry(name)
        super().put(name, tree)


def checkpoint_layers(
    folder: str | Path, layer_of: Callable[[str], str | None]
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields the layers of a folder of safetensors, each as its tensors by name, in the order of
    their first tensors; only one layer is in memory.

    layer_of: returns the layer of a tensor's name, None for a tensor that is not wanted.
    """
    tensors = SafeTensors(weight_files(Path(folder).expanduser()))
    names: dict[str, list[str]] = {}
    for name in tensors:
        layer = layer_of(name)
        if layer is not None:
            names.setdefault(layer, []).append(name)
    for layer, members in names.items():
        yield layer, {name: tensors.rows(name)[:] for name in members}
