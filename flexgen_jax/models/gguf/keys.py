"""The metadata of a GGUF file's architecture."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.container import GgufFile


class Keys:
    """Metadata of an architecture, whose names begin with its own."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.metadata, self._begin = file, file.metadata, architecture
        self._read = set[str]()

    def maybe(self, name: str) -> Any:
        self._read.add(name)
        return self.metadata.get(f"{self._begin}.{name}")

    def unread(self) -> dict[str, Any]:
        """Returns the metadata that nothing has read."""
        begin = f"{self._begin}."
        names = [name.removeprefix(begin) for name in self.metadata if name.startswith(begin)]
        return {name: self.metadata[begin + name] for name in names if name not in self._read}

    def need(self, name: str) -> Any:
        value = self.maybe(name)
        if value is None:
            raise CheckpointError(
                f"{self.file.path}: its metadata has no {self._begin}.{name}; convert it again"
            )
        return value

    def by_layer(self, name: str, layers: int) -> list[Any]:
        """Returns the value of each layer; metadata may have an array of them, or one for all."""
        value = self.need(name)
        if not np.ndim(value):
            return [value] * layers
        if len(value) < layers:
            raise self.refused(name, f"{len(value)} values for {layers} layers")
        return list(value[:layers])

    def skip(self, *names: str) -> None:
        """Marks metadata as known to have no effect on this model."""
        self._read.update(names)

    def expect(self, name: str, value: float) -> None:
        """Raises `CheckpointError` if metadata is there and has another value."""
        found = self.maybe(name)
        if found is not None and float(found) != value:
            raise self.refused(name, found)

    def special(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}_token_id")

    def refused(self, name: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path}: {self._begin}.{name} is {value}, which is not supported; get the "
            "model as safetensors"
        )

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def floats(self, tensor: str) -> list[float]:
        """Returns the numbers of a small tensor in fp32."""
        entry = self.file.tensors[tensor]
        stored: np.ndarray = self.file.content(entry)[entry.begin : entry.begin + entry.nbytes]
        return [float(number) for number in stored.view("<f4")]
