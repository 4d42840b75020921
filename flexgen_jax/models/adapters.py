"""LoRA adapters in the files of peft: low-rank matrices that add to a model's products (Hu et al.
2021, "LoRA", section 4.1).

A product W x becomes W x + s B (A x). A is [rank, in] and B is [out, rank]; s is a number. The
model's own weights do not change, so they may be quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax.models.config import AdapterShapes, ModelConfig
from flexgen_jax.models.delta_net import DeltaNetSpec
from flexgen_jax.models.families import family_of
from flexgen_jax.models.family import Stored
from flexgen_jax.models.folder import ADAPTER, MERGE, CheckpointError, read_object
from flexgen_jax.models.formats.published import of_any_expert
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import TensorSpec
from flexgen_jax.models.tensors import SafeTensors
from flexgen_jax.models.weight_source import WeightSource, digest, numpy_dtype

WEIGHTS = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""What peft's names of a model's modules begin with."""

NOT_SUPPORTED = (
    "use_dora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
    "megatron_config",
)
"""Fields of an adapter's config that change its results, in a way that is not computed here."""

CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq")
"""Methods of `init_lora_weights` that change the model's own weights in peft."""

NOT_ADAPTED = ("attention.kv_up.kernel",)
"""Matrices that are multiplied in parts, not as a whole, so that they have no adapters."""


@dataclass(frozen=True)
class LowRank:
    """The matrices of an adapter for one module: their names in the file, and the factor s."""

    a: str
    b: str
    scale: float


class Adapter:
    """A folder with an adapter of peft; raises `CheckpointError` for one that cannot be applied.

    name: the name in requests, "" for an adapter of all texts. modules: the matrices of each
    module, such as "model.layers.0.self_attn.q_proj"; replaced: names in the file of tensors that
    replace the model's, by the model's names.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name
        self._options = _checked_options(folder)
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder} has no {WEIGHTS}; {_way_out(folder)}")
        self.tensors = SafeTensors([folder / WEIGHTS])
        self.modules: dict[str, LowRank] = {}
        self.replaced: dict[str, str] = {}
        for key in self.tensors:
            self._add(key)
        if not self.modules and not self.replaced:
            raise CheckpointError(f"{folder / WEIGHTS} has no matrices of an adapter")

    def _add(self, key: str) -> None:
        """Sorts in a tensor of the file."""
        bare = key.removeprefix(PREFIX)
        matrix = re.fullmatch(r"(.*)\.lora_([AB])(\.default)?\.weight", bare)
        if matrix is None:
            if ".lora_" in bare:
                raise CheckpointError(
                    f"{self.folder / WEIGHTS}: tensor {key!r}: adapters of embeddings and biases "
                    "are not supported"
                )
            name = re.sub(r"\.(modules_to_save(\.default)?|original_module)\.", ".", bare)
            self.replaced[name] = key
        elif matrix[2] == "A":
            module, other = matrix[1], key.replace(".lora_A", ".lora_B")
            if other not in self.tensors:
                raise CheckpointError(f"{self.folder / WEIGHTS}: tensor {other!r} is missing")
            rank = self.tensors.shape(key)[0]
            self.modules[module] = LowRank(key, other, self._scale(module, rank))
        elif key.replace(".lora_B", ".lora_A") not in self.tensors:
            raise CheckpointError(f"{self.folder / WEIGHTS}: tensor {key!r} has no lora_A")

    def _scale(self, module: str, rank: int) -> float:
        """Returns the factor s of a module."""
        alpha: float = self._options.get("lora_alpha", 8)
        for pattern, value in (self._options.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        return alpha / (sqrt(rank) if self._options.get("use_rslora") else rank)

    def matrix(self, name: str) -> np.ndarray:
        """Returns a matrix of the file, fp32."""
        return np.asarray(self.tensors.rows(name)[:]).astype(np.float32)


def _checked_options(folder: Path) -> dict[str, Any]:
    """Returns an adapter's config; raises `CheckpointError` where it is not supported."""
    path = folder / ADAPTER
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER}; give the folder of a LoRA adapter")
    options = read_object(path)
    kind = options.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type {kind!r} is not supported, only 'LORA'")
    for name in NOT_SUPPORTED:
        if options.get(name):
            raise CheckpointError(f"{path}: {name} {options[name]!r} is not supported")
    if options.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias {options['bias']!r} is not supported, only 'none'")
    method = str(options.get("init_lora_weights", True)).lower()
    if method.startswith(CHANGES_WEIGHTS):
        raise CheckpointError(
            f"{path}: init_lora_weights {method!r} changes the model's own weights: save the "
            "adapter with peft's path_initial_model_for_weight_conversion"
        )
    return options


def _way_out(folder: Path) -> str:
    if (folder / "adapter_model.bin").is_file():
        return "load its adapter_model.bin with peft, and save it with safe_serialization"
    return f"get the adapter's {WEIGHTS}"


class AdaptedWeights:
    """The weights of a model and of its adapters; see `WeightSource`.

    adapters: a single one without a name, or several with names. Raises `CheckpointError` if one
    does not fit the model.
    """

    def __init__(self, source: WeightSource, adapters: Sequence[Adapter]) -> None:
        self._source, self._adapters = source, adapters
        family, config = family_of(source.config), source.config
        self._modules = [
            {family.bare_name(module): low for module, low in adapter.modules.items()}
            for adapter in adapters
        ]
        first = adapters[0]
        replaced = {family.bare_name(name): key for name, key in first.replaced.items()}
        if config.tied_head and str(family.names["head.tokens"]) in replaced:
            config = replace(config, tied_head=False)
        # Where each adapted matrix lies in its module, by the matrix's key.
        self._where: dict[str, Stored] = {}
        # Tensors that replace the model's: their names in the adapter's file, by key.
        self._replaced: dict[str, str] = {}
        known = set[str]()
        for tensor in model_spec(config).tensors.values():
            for stored in family.layouts(tensor, config):
                module = stored.name.removesuffix(".weight")
                if _has_adapters(tensor, stored) and any(module in m for m in self._modules):
                    self._where[tensor.key] = stored
                    known.add(module)
                if stored.name in replaced:
                    self._check_replaced(config, tensor, replaced[stored.name])
                    self._replaced[tensor.key] = replaced[stored.name]
                    known.add(stored.name)
        self._check_known(known, replaced)
        self.config = self._adapted(config)

    def _check_known(self, known: set[str], replaced: Mapping[str, str]) -> None:
        """Raises `CheckpointError` for modules and tensors of adapters that the model lacks."""
        for adapter, modules in zip(self._adapters, self._modules, strict=True):
            if unknown := sorted(set(modules) - known):
                raise CheckpointError(
                    f"{adapter.folder / WEIGHTS}: {unknown[0]!r} is not a module of this model "
                    "that can have an adapter"
                )
            if adapter.replaced and adapter.name:
                raise CheckpointError(
                    f"{adapter.folder / ADAPTER}: modules_to_save replaces weights for all texts: "
                    "give this adapter alone and without a name"
                )
        if unknown := sorted(set(replaced) - known):
            raise CheckpointError(
                f"{self._adapters[0].folder / WEIGHTS}: {unknown[0]!r} is not a tensor of this "
                "model"
            )

    def _check_replaced(self, config: ModelConfig, tensor: TensorSpec, name: str) -> None:
        path, shape = self._adapters[0].folder / WEIGHTS, self._adapters[0].tensors.shape(name)
        if shape != tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {shape}, but the model's is {tensor.shape}"
            )
        if tensor.key == "embedding.tokens" and config.tied_head:
            raise CheckpointError(
                f"{path}: tensor {name!r} replaces the embedding of a model whose head is the same "
                f"table: {MERGE}"
            )

    def _adapted(self, config: ModelConfig) -> ModelConfig:
        """Returns a config with the shapes of the adapters."""
        self._check_order(config)
        tensors = model_spec(config).tensors
        ranks = tuple((key, self._rank(tensors[key])) for key in sorted(self._where))
        names = tuple(adapter.name for adapter in self._adapters if adapter.name)
        published = config.published
        if published is not None:
            keys = {of_any_expert(key) for key in self._replaced}
            formats = tuple(entry for entry in published.formats if entry[0] not in keys)
            published = replace(published, formats=formats)
        content = digest(names, [adapter.tensors.files.contents() for adapter in self._adapters])
        shapes = AdapterShapes(names, ranks, content)
        return replace(config, published=published, adapters=shapes)

    def _check_order(self, config: ModelConfig) -> None:
        """Raises `CheckpointError` for adapters of a recurrent layer whose heads are stored in
        another order than in the model that was adapted."""
        for layer in model_spec(config).decoders:
            is_tiled = isinstance(layer.mixer, DeltaNetSpec) and layer.mixer.are_tiled
            mixing = (t.key for t in layer.tensors if t.path.startswith("attention."))
            if is_tiled and any(key in self._where for key in mixing):
                raise CheckpointError(
                    f"{self._adapters[0].folder}: adapters of recurrent layers do not fit this "
                    "GGUF file, which has their heads in another order: use the safetensors"
                )

    def _rank(self, tensor: TensorSpec) -> int:
        """Returns the largest rank of the adapters for a matrix; checks their shapes."""
        stored, ranks = self._where[tensor.key], list[int]()
        for adapter, low in self._of_matrix(stored):
            rank = adapter.tensors.shape(low.a)[0]
            rows = tensor.shape[0] if stored.total is None else stored.total
            for name, shape in ((low.a, (rank, tensor.shape[1])), (low.b, (rows, rank))):
                if adapter.tensors.shape(name) != shape:
                    raise CheckpointError(
                        f"{adapter.folder / WEIGHTS}: tensor {name!r} has shape "
                        f"{adapter.tensors.shape(name)}, but the model requires {shape}"
                    )
            ranks.append(rank)
        return max(ranks)

    def _of_matrix(self, stored: Stored) -> Iterator[tuple[Adapter, LowRank]]:
        """Yields the adapters of a matrix."""
        for adapter, modules in zip(self._adapters, self._modules, strict=True):
            low = modules.get(stored.name.removesuffix(".weight"))
            if low is not None:
                yield adapter, low

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        if tensor.key in self._replaced:
            rows = self._adapters[0].tensors.rows(self._replaced[tensor.key])[start:stop]
            return np.asarray(rows).astype(numpy_dtype(dtype), copy=False)
        if tensor.role != "adapter":
            return self._source.read(tensor, start, stop, dtype)
        return self._low_rank(tensor)[start:stop].astype(numpy_dtype(dtype))

    def _low_rank(self, tensor: TensorSpec) -> np.ndarray:
        """Returns the matrices of all adapters as one, fp32, with zeros where an adapter has a
        lower rank or none: A is [adapter, rank, in], the
        transpose of s B is [adapter, rank, out]."""
        matrix, _, side = tensor.key.rpartition(".lora_")
        stored, array = self._where[f"{matrix}.kernel"], np.zeros(tensor.shape, np.float32)
        for adapter, low in self._of_matrix(stored):
            number = self._adapters.index(adapter)
            if side == "a":
                a = adapter.matrix(low.a)
                array[number, : len(a)] = a
            else:
                b = adapter.matrix(low.b) * low.scale
                rows = [b[part] for part in stored.ranges(0, tensor.shape[2])]
                array[number, : b.shape[1]] = np.concatenate(rows).T
        return array

    def read_packed(self, tensor: TensorSpec, start: int, stop: int) -> list[np.ndarray]:
        return self._source.read_packed(tensor, start, stop)

    def fingerprint(self, dtype: str) -> str:
        """See `WeightSource`: stored copies are those of the model, unless a tensor is replaced."""
        fingerprint = self._source.fingerprint(dtype)
        if not self._replaced:
            return fingerprint
        return digest(fingerprint, self._adapters[0].tensors.files.with_times())

    def content(self, dtype: str) -> str:
        assert self.config.adapters is not None, "there are some"
        return digest(self._source.content(dtype), self.config.adapters.content)

    @property
    def reads_at_once(self) -> int:
        return self._source.reads_at_once


def _has_adapters(tensor: TensorSpec, stored: Stored) -> bool:
    """Returns whether a matrix that is stored so can have adapters."""
    is_matrix = tensor.key.startswith("decoder.") and tensor.path.endswith(".kernel")
    return is_matrix and stored.expert is None and tensor.path not in NOT_ADAPTED
