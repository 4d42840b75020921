"""Files of a Hugging Face folder: JSON, and which files have the weights.

Nothing that a file names is opened outside of its folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexgen_jax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a model's weights in one file, and of the index of several."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read; the message names the file and the tensor."""


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, an empty one if there is no such file."""
    if not path.is_file():
        return {}
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return raw


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that are the model, chosen as transformers does: one whole file
    comes before an index.

    Raises `CheckpointError` if there are none, or if the index names a file that is missing or not
    in the folder.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / SINGLE).exists():
        raise CheckpointError(f"{folder / SINGLE} is not a regular file")
    if (folder / INDEX).is_file():
        return [safe_member(folder, name, folder / INDEX) for name in indexed_names(folder)]
    raise CheckpointError(f"{folder} has no {SINGLE}; {what_it_has(folder)}")


def indexed_names(folder: Path) -> list[str]:
    """Returns the names of the files that a folder's index lists."""
    index = folder / INDEX
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{index} has no weight_map")
    return sorted(set(names.values()))


ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge it into its base model, e.g. with PEFT's merge_and_unload"
WITHOUT_BASE = "it is an adapter (LoRA): name its base model with --model, and it with --adapter"


def what_it_has(folder: Path) -> str:
    """Returns a hint for a folder without a model: its contents, and the way out."""
    if (folder / ADAPTER).is_file():
        return WITHOUT_BASE
    if (folder / "params.json").is_file():
        return (
            "it has Mistral's or Meta's own names, params.json and consolidated files: get the "
            "same model in Hugging Face's form"
        )
    if any(folder.glob("*.bin")):
        return f"it has .bin files: run `flexgen-jax convert {folder} DST` first"
    if any(folder.glob("*.gguf")):
        name = min(path.name for path in folder.glob("*.gguf"))
        return f"it has GGUF files: name one of them, --model {folder / name}"
    safetensors_files = sorted(path.name for path in folder.glob("*.safetensors"))
    if safetensors_files:
        return f"it has {safetensors_files[0]}, which no {INDEX} names: rename it, or add the index"
    return "get the model's safetensors, or .bin files to convert"


def safe_member(folder: Path, name: str, index: Path) -> Path:
    """Returns `folder` / `name`, a file that `index` names.

    Raises `CheckpointError` if the file is missing or the name points outside the folder.
    """
    path = folder / name
    # The path is not resolved: files in the hub's cache are links to a blob store elsewhere.
    if Path(name).name != name or name in (".", ".."):
        raise CheckpointError(f"{index} refers to {name!r}, which is outside its folder")
    if not path.is_file():
        raise CheckpointError(f"{index} refers to {name!r}, which is missing")
    return path
