"""LoRA adapters in the files of peft: low-rank matrices that add to a model's products (Hu et al.
2021, "LoRA", section 4.1).

A product W x becomes W x + s B (A x). A is [rank, in] and B is [out, rank]; s is a number. The
model's own weights do not change, so they may be quantized.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flexgen_jax.models.config import AdapterShapes, ModelConfig
from flexgen_jax.models.delta_net import DeltaNetSpec
from flexgen_jax.models.families import family_of
from flexgen_jax.models.family import Family, Stored
from flexgen_jax.models.folder import ADAPTER, MERGE, CheckpointError, read_object
from flexgen_jax.models.folder import ADAPTER_WEIGHTS as WEIGHTS
from flexgen_jax.models.formats.published import of_any_expert
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import TensorSpec
from flexgen_jax.models.tensors import DTYPE_NAMES, SafeTensors
from flexgen_jax.models.weight_source import WeightSource, digest, numpy_dtype

T = TypeVar("T")

PREFIX = "base_model.model."
"""What peft's names of a model's modules begin with."""

APPLIED = (
    "peft_type",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "init_lora_weights",
    "modules_to_save",
)
"""Fields of an adapter's config that are read, or whose tensors are."""

WITHOUT_EFFECT = (
    "r",
    "rank_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "lora_dropout",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "ensure_weight_tying",
)
"""Fields that the matrices already follow, and those that concern training or other programs."""

CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga", "kasa")
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
        matrix = re.fullmatch(r"(.*)\.lora_([AB])(\.\w+)?\.weight", bare)
        if matrix is None:
            if ".lora_" in bare:
                raise CheckpointError(
                    f"{self.folder / WEIGHTS}: tensor {key!r} is not supported, as of adapters of "
                    f"embeddings, biases and DoRA: {MERGE}"
                )
            name = re.sub(r"\.(modules_to_save(\.default)?|original_module)\.", ".", bare)
            self.replaced[name] = key
        elif matrix[2] == "A":
            module, other = matrix[1], key.replace(".lora_A", ".lora_B")
            if other not in self.tensors:
                raise CheckpointError(f"{self.folder / WEIGHTS}: tensor {other!r} is missing")
            for name in (key, other):
                shape, dtype = self.tensors.shape(name), self.tensors.dtype(name)
                if len(shape) != 2 or 0 in shape or dtype not in DTYPE_NAMES:
                    raise CheckpointError(
                        f"{self.folder / WEIGHTS}: tensor {name!r} is {dtype} with shape {shape}, "
                        f"not a matrix of {', '.join(DTYPE_NAMES)}"
                    )
            scale = self._scale(module, self.tensors.shape(key)[0])
            self.modules[module] = LowRank(key, other, scale)
        elif key.replace(".lora_B", ".lora_A") not in self.tensors:
            raise CheckpointError(f"{self.folder / WEIGHTS}: tensor {key!r} has no lora_A")

    def _scale(self, module: str, rank: int) -> float:
        """Returns the factor s of a module."""
        path, alpha = self.folder / ADAPTER, self._options.get("lora_alpha", 8)
        patterns = self._options.get("alpha_pattern") or {}
        try:
            alpha = next(
                (x for p, x in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), alpha
            )
            scale = float(alpha) / (sqrt(rank) if self._options.get("use_rslora") else rank)
            if not isfinite(scale):
                raise ValueError(f"{alpha} is not a finite number")
            return scale
        except (re.error, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: lora_alpha or alpha_pattern is wrong: {error}"
            ) from None

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
    for name in options:
        if options[name] and name not in (*APPLIED, *WITHOUT_EFFECT):
            raise CheckpointError(f"{path}: {name} {options[name]!r} is not supported: {MERGE}")
    if options.get("bias") not in (None, "none"):
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
        self._modules = [_of_text(family, adapter.modules) for adapter in adapters]
        replaced = _of_text(family, adapters[0].replaced)
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
                    f"that can have an adapter: {MERGE}"
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
                f"{path}: tensor {name!r} has shape {shape}, but the model's is {tensor.shape}: "
                f"{MERGE}"
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
        files = [adapter.tensors.files.contents() for adapter in self._adapters]
        scales = [sorted((m, low.scale) for m, low in x.items()) for x in self._modules]
        content = digest(names, files, scales)
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
        for number, low in self._of_matrix(stored):
            adapter = self._adapters[number]
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

    def _of_matrix(self, stored: Stored) -> Iterator[tuple[int, LowRank]]:
        """Yields the numbers of the adapters that a matrix has, and their matrices."""
        for number, modules in enumerate(self._modules):
            low = modules.get(stored.name.removesuffix(".weight"))
            if low is not None:
                yield number, low

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        if tensor.key in self._replaced:
            rows = self._adapters[0].tensors.rows(self._replaced[tensor.key])[start:stop]
            return np.asarray(rows).astype(numpy_dtype(dtype), copy=False)
        if tensor.role != "adapter":
            return self._source.read(tensor, start, stop, dtype)
        return self._low_rank(tensor)[start:stop].astype(numpy_dtype(dtype))

    def _low_rank(self, tensor: TensorSpec) -> np.ndarray:
        """Returns the matrices of all adapters as one, fp32, with zeros where an adapter has a
        lower rank or none: A, [adapter, rank, in], or s B transposed, [adapter, rank, out]."""
        matrix, _, side = tensor.key.rpartition(".lora_")
        stored, array = self._where[f"{matrix}.kernel"], np.zeros(tensor.shape, np.float32)
        for number, low in self._of_matrix(stored):
            adapter = self._adapters[number]
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


def _of_text(family: Family, of_names: Mapping[str, T]) -> dict[str, T]:
    """Returns the entries of a model's part for text, by names without a prefix. Towers for
    pictures have modules of the same names."""
    bare_names = {family.bare_name(name): entry for name, entry in of_names.items()}
    return {
        name: entry
        for name, entry in bare_names.items()
        if not family.is_ignored(f"{name}.weight", num_layers=sys.maxsize)
    }


def _has_adapters(tensor: TensorSpec, stored: Stored) -> bool:
    """Returns whether a matrix that is stored so can have adapters."""
    is_matrix = tensor.key.startswith("decoder.") and tensor.path.endswith(".kernel")
    return is_matrix and stored.expert is None and tensor.path not in NOT_ADAPTED
