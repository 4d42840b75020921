"""Opens the model that a user names: its config, weights and tokenizer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from flexgen_jax.errors import (
    UserError,
    first_line,
)
from flexgen_jax.models.chat import ChatTemplate
from flexgen_jax.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    DummyWeights,
    WeightSource,
    read_folder_config,
)
from flexgen_jax.models.config import (
    DTYPES,
    ModelConfig,
)
from flexgen_jax.models.defaults import GREEDY, SamplingDefaults, read_defaults
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.tokenizer import Tokenizer

HUB_FILES = ("*.json", "*.safetensors", "merges.txt", "chat_template.jinja")


@dataclass(frozen=True)
class Model:
    """An opened model. The tokenizer is None if there is none, as with dummy weights.

    sampling: what the folder wants for requests that do not say; chat: the folder's template.
    """

    name: str
    config: ModelConfig
    source: WeightSource
    tokenizer: Tokenizer | None
    sampling: SamplingDefaults = GREEDY
    chat: ChatTemplate | None = None


def shipped_model() -> Path:
    """Returns the folder of the small trained OPT that ships with the package."""
    return Path(str(resources.files("flexgen_jax"))) / "data" / "tiny_opt"


def open_model(name: str | Path | None, dummy_weights: bool, seed: int) -> Model:
    """Opens a Hugging Face folder, a hub id or, with dummy weights, a known shape's name.

    The name None stands for the shipped model. seed: for dummy weights. Raises `UserError` if the
    model cannot be opened.
    """
    if dummy_weights:
        if name is None:
            raise UserError("--dummy-weights needs --model, e.g. --model facebook/opt-1.3b")
        folder = Path(name)
        config = read_folder_config(folder) if folder.is_dir() else known_shape(str(name))
        return Model(str(name), config, DummyWeights(config, seed), None)
    folder = shipped_model() if name is None else _local_folder(str(name), needs_weights=True)
    checkpoint, wishes = Checkpoint(folder), read_defaults(folder)
    config = checkpoint.config
    if wishes.eos_ids is not None:
        config = replace(config, eos_ids=wishes.eos_ids)
    tokenizer, chat = Tokenizer(folder, config.bos_id), ChatTemplate(folder)
    return Model(str(name or folder.name), config, checkpoint, tokenizer, wishes.sampling, chat)


def shape_of(name: str | None) -> ModelConfig:
    """Returns only the config, of a known shape or of a model that `open_model` can open."""
    if name is not None and not Path(name).expanduser().exists():
        with contextlib.suppress(UserError):
            return known_shape(name)
    return read_folder_config(shipped_model() if name is None else _local_folder(name))


def _local_folder(name: str, needs_weights: bool = False) -> Path:
    folder = Path(name).expanduser()
    if folder.exists():
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; name the folder of config.json")
        return folder
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"{name} does not exist; name a Hugging Face folder or a hub id")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub raises many kinds of network errors
        raise CheckpointError(
            f"{name} is not a local folder and cannot be downloaded from the hub: "
            f"{first_line(error)}"
        ) from None
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{name} has no safetensors on the hub: get its .bin files with `hf download {name} "
            "--local-dir SRC`, install PyTorch, run `flexgen-jax convert SRC DST`, and give "
            "--model DST"
        )
    return folder


def resolve_dtype(dtype: str, config: ModelConfig, on_cpu: bool) -> str:
    """Returns the dtype to compute in; "auto" stands for the checkpoint's dtype.

    On the CPU, "auto" takes bfloat16 in place of float16, whose products are much slower there.
    Raises `UserError` for an unknown dtype.
    """
    if dtype == "auto":
        return "bfloat16" if on_cpu and config.dtype == "float16" else config.dtype
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; choose auto or one of {list(DTYPES)}")
    return dtype
