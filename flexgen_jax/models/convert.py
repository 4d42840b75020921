"""Converts PyTorch .bin checkpoints to safetensors, one shard in memory at a time."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

from flexgen_jax.models.checkpoint import (
    CheckpointError,
    read_folder_config,
    read_json,
    safe_member,
)

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def convert_folder(source: Path, destination: Path) -> list[Path]:
    """Writes `source`'s tensors to `destination` as safetensors, and copies its other files.

    Every file appears whole or not at all, config.json last. Returns the weight files. Raises
    `CheckpointError` if PyTorch is missing or a file holds anything but tensors.
    """
    read_folder_config(source)
    shards = _bin_files(source)
    destination.mkdir(parents=True, exist_ok=True)
    written, where, total = [], {}, 0
    for number, shard in enumerate(shards, 1):
        tensors = _load(shard)
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _save(tensors, destination / name)
        where.update(dict.fromkeys(tensors, name))
        written.append(destination / name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _replace(destination / "model.safetensors.index.json", json.dumps(index, indent=2))
    for name in reversed(COPIED):
        if (source / name).is_file() and source.resolve() != destination.resolve():
            shutil.copyfile(source / name, destination / f"{name}.part")
            (destination / f"{name}.part").replace(destination / name)
    return written


def _bin_files(source: Path) -> list[Path]:
    index = source / "pytorch_model.bin.index.json"
    if index.is_file():
        raw = read_json(index)
        names = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files")
        return [safe_member(source, name, index) for name in sorted(set(names.values()))]
    single = source / "pytorch_model.bin"
    if not single.is_file():
        raise CheckpointError(f"{source} has no pytorch_model.bin to convert")
    return [single]


def _load(shard: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            "reading .bin files needs PyTorch's restricted loader: pip install torch, or get the "
            "checkpoint as safetensors"
        ) from None
    try:
        loaded = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{shard}: cannot be read as a checkpoint that holds only tensors: {first}"
        ) from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{shard} does not hold tensors by name")
    wrong = [name for name, value in loaded.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise CheckpointError(f"{shard}: {wrong[0]!r} is not a tensor")
    return loaded


def _save(tensors: dict[str, Any], path: Path) -> int:
    """Writes one file and returns its tensors' bytes; tensors that share memory are duplicated."""
    from safetensors.torch import save_file

    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    part = path.with_suffix(".part")
    save_file(copies, part, metadata={"format": "pt"})
    part.replace(path)
    return sum(tensor.nbytes for tensor in copies.values())


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
