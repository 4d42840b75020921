"""Converts PyTorch .bin checkpoints to safetensors, one tensor in memory at a time."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexgen_jax.models.checkpoint import read_folder_config
from flexgen_jax.models.file_writing import Entry, write_json, write_safetensors
from flexgen_jax.models.folder import INDEX, SINGLE, CheckpointError, read_object, safe_member

WEIGHTS = (".bin", ".safetensors", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
"""Ends of names of files with weights, which are not copied."""

DTYPES = {
    "float64": "F32",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Safetensors' names of PyTorch's dtypes."""

PIECE_BYTES = 16 << 20
"""Bytes that are written at once."""


def convert_folder(source: Path, destination: Path) -> list[Path]:
    """Writes `source`'s tensors to `destination` as safetensors, and copies its other files, such
    as those of the tokenizer and the chat template.

    Every file appears whole or not at all, config.json last. Returns the weight files. Raises
    `CheckpointError` if PyTorch is missing or a file holds anything but tensors.
    """
    read_folder_config(source)
    shards = _bin_files(source)
    destination.mkdir(parents=True, exist_ok=True)
    written, weight_map, total = [], {}, 0
    for number, shard in enumerate(shards, 1):
        tensors = _load(shard)
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _save(tensors, destination / name)
        weight_map.update(dict.fromkeys(tensors, name))
        written.append(destination / name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(destination / INDEX, index)
    if source.resolve() != destination.resolve():
        copy_others(source, destination)
    return written


def copy_others(source: Path, destination: Path, but: tuple[str, ...] = ()) -> None:
    """Copies all that is not weights, config.json last; but: names that are left out."""
    files = [path for path in source.iterdir() if path.is_file()]
    files += (source / "additional_chat_templates").glob("*.jinja")
    for path in sorted(files, key=lambda path: path.name == "config.json"):
        is_hidden = path.name.startswith(".") or path.name in but
        if is_hidden or path.name.endswith((*WEIGHTS, ".index.json")):
            continue
        target = destination / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        partial = target.with_name(f"{target.name}.part")
        shutil.copyfile(path, partial)
        partial.replace(target)


def _bin_files(source: Path) -> list[Path]:
    """Returns the files to convert, chosen as transformers does: one whole file comes first."""
    single, index = source / "pytorch_model.bin", source / "pytorch_model.bin.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{source} has no pytorch_model.bin to convert")
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{index} has no weight_map")
    return [safe_member(source, name, index) for name in sorted(set(names.values()))]


def _load(shard: Path) -> dict[str, Any]:
    """Returns the tensors of a file, which stay in the file until they are read where that is
    possible; files of before PyTorch 1.6 are in memory as a whole."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            "reading .bin files needs PyTorch's restricted loader: pip install torch, or get the "
            "checkpoint as safetensors"
        ) from None
    try:
        loaded = torch.load(
            shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard)
        )
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{shard}: cannot be read as a checkpoint with tensors only: {first}"
        ) from None
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{shard} is not a dictionary of tensors")
    wrong = [name for name, value in loaded.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise CheckpointError(f"{shard}: {wrong[0]!r} is not a tensor")
    return dict(loaded)


def _save(tensors: dict[str, Any], path: Path) -> int:
    """Writes one file, tensor by tensor, and returns its tensors' bytes; tensors that share memory
    are written each."""
    import torch

    entries = []
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"{path}: {name!r} is a sparse tensor, or one without numbers")
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise CheckpointError(
                f"{path}: {name!r} is {tensor.dtype}, which safetensors does not support"
            )
        entries.append(Entry(name, dtype, tuple(tensor.shape)))
    pieces = (piece for tensor in tensors.values() for piece in _pieces(tensor))
    return write_safetensors(path, entries, pieces)


def _pieces(tensor: Any) -> Iterator[memoryview]:
    """Yields a tensor's bytes; only one whose elements are not in order is copied first. Numbers of
    64 bits, which no run reads, get 32."""
    import torch

    tensor = tensor.detach()
    tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), PIECE_BYTES):
        yield memoryview(flat[begin : begin + PIECE_BYTES].numpy())
