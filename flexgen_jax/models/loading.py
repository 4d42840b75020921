"""Opens the model that a user names: its config, weights and tokenizer."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from flexgen_jax.errors import (
    UserError,
    first_line,
)
from flexgen_jax.models.adapters import AdaptedWeights, Adapter
from flexgen_jax.models.chat import ChatTemplate
from flexgen_jax.models.checkpoint import Checkpoint, read_folder_config
from flexgen_jax.models.config import (
    DTYPES,
    ModelConfig,
)
from flexgen_jax.models.defaults import (
    FILE,
    GREEDY,
    GenerationDefaults,
    SamplingDefaults,
    read_defaults,
)
from flexgen_jax.models.families import quantization_of
from flexgen_jax.models.folder import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    INDEX,
    SINGLE,
    WITHOUT_BASE,
    CheckpointError,
    indexed_names,
    read_json,
    read_object,
)
from flexgen_jax.models.gguf.config import config_of
from flexgen_jax.models.gguf.folder import as_folder, only_gguf
from flexgen_jax.models.pooling import (
    WITHOUT_FILES,
    PoolingDefaults,
    read_pooling,
    transformer_folder,
)
from flexgen_jax.models.shapes import SHAPES, known_shape, with_formats
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.weight_source import DummyWeights, WeightSource

HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of a model on the Hub other than weights."""

HUB_LEFT_OUT = ("[!0-9]*/*.json", "*/*.txt", "*/*.model", "consolidated*")
"""Files of other formats, such as those in original/ or onnx/. Folders of sentence-transformers,
such as 1_Pooling/, begin with a digit."""


@dataclass(frozen=True)
class Model:
    """An opened model. The tokenizer is None if there is none, as with dummy weights.

    sampling: the folder's sampling defaults; chat: the folder's template; pooling: how its texts
    become vectors; notes: what a user should know about how the folder's files were taken.
    """

    name: str
    config: ModelConfig
    source: WeightSource
    tokenizer: Tokenizer | None
    sampling: SamplingDefaults = GREEDY
    chat: ChatTemplate | None = None
    pooling: PoolingDefaults = WITHOUT_FILES
    notes: tuple[str, ...] = ()

    def fingerprint(self, dtype: str) -> str:
        """Returns a name for all weights in `dtype`, adapters included; see `WeightSource`, whose
        `fingerprint` names the stored ones."""
        adapters = self.config.adapters
        name = self.source.fingerprint(dtype)
        return name if adapters is None else f"{name}-{adapters.content}"

    @classmethod
    def from_arrays(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, Any],
        tokenizer: str | Path | None = None,
        name: str = "model",
    ) -> Model:
        """Returns a model of tensors that a program has, such as one that it has just trained.

        config: as in Hugging Face's `config.json`.
        tensors: by the names that Hugging Face gives them, "model.embed_tokens.weight": arrays of
            NumPy or JAX, or anything that has a shape and a dtype and gives rows for slices, such
            as `numpy.memmap` or a dataset of h5py. They must not change while the model is used.
        tokenizer: a folder with a tokenizer's files, and perhaps a chat template; None where
            prompts are token ids.
        name: for messages.

        Raises `UserError` if a tensor is missing, or is none of the model's.
        """
        checkpoint = Checkpoint.of_arrays(name, config, tensors)
        if tokenizer is None:
            notes = tuple(f"{name}: {note}" for note in checkpoint.notes)
            return cls(name, checkpoint.config, checkpoint, None, notes=notes)
        return _with_files(checkpoint, Path(tokenizer).expanduser(), name)


def shipped_model() -> Path:
    """Returns the folder of the small trained OPT that ships with the package."""
    return Path(str(resources.files("flexgen_jax"))) / "data" / "tiny_opt"


def open_model(
    name: str | Path | Model | None,
    dummy_weights: bool,
    seed: int,
    weight_bits: int | None = None,
    requantizes: bool = False,
    adapters: Sequence[str] = (),
) -> Model:
    """Opens a Hugging Face folder, a hub id or, with dummy weights, a known shape's name.

    The name None stands for the shipped model; an open model is used directly. seed: for dummy
    weights; weight_bits: the requested bits; a model that is published in few bits keeps its own
    unless `requantizes`; adapters: folders of LoRA adapters, "PATH" or "NAME=PATH". Raises
    `UserError` if the model or an adapter cannot be opened.
    """
    if not isinstance(name, Model | None) and not dummy_weights:
        name, adapters = _with_own_adapter(str(name), adapters)
    model = name if isinstance(name, Model) else _opened(name, dummy_weights, seed)
    model = _with_bits(model, weight_bits, requantizes)
    return _with_adapters(model, adapters) if adapters else model


def _with_own_adapter(name: str, adapters: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Returns the name of a model and its adapters: of a folder that is an adapter, or has one
    beside the model, as transformers takes them."""
    folder = Path(name).expanduser()
    if not (folder / ADAPTER).is_file():
        return name, adapters
    if adapters and (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{folder} has an adapter already: remove {ADAPTER}, or give no --adapter")
    if (folder / "config.json").is_file():
        return name, (name,) if (folder / ADAPTER_WEIGHTS).is_file() else adapters
    base = read_object(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise CheckpointError(f"{folder}: {WITHOUT_BASE}")
    return base, (name,)


def _with_bits(model: Model, weight_bits: int | None, requantizes: bool) -> Model:
    """Returns a model with the requested bits; see `open_model`."""
    published = model.config.published
    if published is None or weight_bits is None or weight_bits == 16:
        return model
    if not requantizes:
        raise UserError(
            f"{model.name} is published in {published.bits} bits ({published.name}), which are "
            f"kept; --weight-bits {weight_bits} would round its weights a second time: leave it "
            "out, or add --requantize"
        )
    model.source.config = config = replace(model.config, published=None)
    return replace(model, config=config)


def _with_adapters(model: Model, given: Sequence[str]) -> Model:
    """Returns a model with LoRA adapters."""
    named = [_name_and_folder(text) for text in given]
    names = [name for name, _ in named]
    if taken := {model.name, Path(model.name).name} & set(names):
        raise UserError(
            f"--adapter {taken.pop()}=...: this is the model's own name; choose another"
        )
    if len(named) > 1 and (not all(names) or len(set(names)) < len(names)):
        raise UserError(
            "several adapters need different names, by which texts choose one: --adapter "
            "NAME=PATH --adapter OTHER=PATH"
        )
    source = AdaptedWeights(model.source, [Adapter(folder, name) for name, folder in named])
    shapes = source.config.adapters
    config = replace(
        model.config,
        adapters=shapes,
        published=source.config.published,
        tied_head=source.config.tied_head,
    )
    return replace(model, config=config, source=source)


def _name_and_folder(text: str) -> tuple[str, Path]:
    """Returns the name and the folder of an adapter that is given as "NAME=PATH" or "PATH"."""
    name, separator, path = text.partition("=")
    if not separator or Path(text).exists():
        name, path = "", text
    elif not name:
        raise UserError(f"--adapter {text}: write it as NAME=PATH, or as PATH for all texts")
    folder = Path(path).expanduser() if path.startswith("~/") else Path(path)
    if folder.is_dir():
        return name, folder
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return name, _from_hub(path, ("adapter_*",))
    problem = "is not a folder" if folder.exists() else "does not exist"
    raise CheckpointError(f"--adapter: {path} {problem}; pass the folder of a LoRA adapter")


def _opened(name: str | Path | None, dummy_weights: bool, seed: int) -> Model:
    if dummy_weights:
        if name is None:
            raise UserError("--dummy-weights needs --model, e.g. --model facebook/opt-1.3b")
        folder = Path(name)
        config = read_folder_config(folder) if folder.is_dir() else known_shape(str(name))
        return Model(str(name), config, DummyWeights(config, seed), None)
    folder = shipped_model() if name is None else _local_folder(str(name), needs_weights=True)
    checkpoint = Checkpoint(folder)
    with _files_beside(checkpoint) as files:
        return _with_files(checkpoint, files, str(name or folder.name))


def _with_files(checkpoint: Checkpoint, files: Path, name: str) -> Model:
    """Returns a model whose tokenizer, chat template and defaults come from the folder `files`."""
    config, folder, wishes = checkpoint.config, checkpoint.folder, read_defaults(files)
    tokenizer, chat = Tokenizer(files, config.bos_id), ChatTemplate(files)
    ends = config.eos_ids if wishes.eos_ids is None else wishes.eos_ids
    notes = [f"{folder}: {note}" for note in checkpoint.notes]
    notes += _notes_on_wishes(wishes)
    if wishes.eos_ids is None and wishes.path.name == FILE and ends:
        notes.append(
            f"{folder}: using the end tokens of config.json, {list(ends)}, because {FILE} has none"
        )
    end = tokenizer.special_id("eos_token")
    if end is not None and end not in ends:
        notes.append(
            f"{folder}: the tokenizer's end token {tokenizer.special.text('eos_token')} (id "
            f"{end}) is used as well, although config.json and generation_config.json lack it"
        )
        ends = (*ends, end)
    return Model(
        name=name,
        config=replace(config, eos_ids=ends),
        source=checkpoint,
        tokenizer=tokenizer,
        sampling=wishes.sampling,
        chat=chat,
        pooling=read_pooling(files),
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _files_beside(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yields the folder with the tokenizer and other files except weights: of a GGUF file
    one that is made of its metadata."""
    if checkpoint.container is None:
        yield checkpoint.folder
        return
    with as_folder(checkpoint.container, config_of(checkpoint.container)) as folder:
        yield folder


def _notes_on_wishes(wishes: GenerationDefaults) -> list[str]:
    """Returns messages about the folder's other sampling defaults: applied and unsupported ones."""
    notes = []
    if wishes.sampling.rules:
        rules = ", ".join(f"{name} {_short(x)}" for name, x in wishes.sampling.rules.items())
        notes.append(f"{wishes.path}: using {rules}, unless a request overrides them")
    if wishes.undone:
        notes.append(f"{wishes.path}: not supported and ignored: {', '.join(wishes.undone)}")
    return notes


def _short(value: Any) -> str:
    """Returns a value as text, of long lists their number of elements."""
    is_long = isinstance(value, tuple) and len(value) > 4
    return f"({len(value)} entries)" if is_long else str(value)


def shape_of(name: str | None, adapters: Sequence[str] = ()) -> ModelConfig:
    """Returns only the config, of a known shape or of a model that `open_model` can open, with
    adapters as there."""
    if name is not None:
        name, adapters = _with_own_adapter(name, adapters)
    config = _shape_alone(name)
    if adapters:
        return _with_adapters(Model(str(name), config, DummyWeights(config), None), adapters).config
    return config


def _shape_alone(name: str | None) -> ModelConfig:
    if name is not None and not Path(name).expanduser().exists():
        with contextlib.suppress(UserError):
            return known_shape(name)
    folder = shipped_model() if name is None else _local_folder(name)
    has_weights = folder.is_file() or any((folder / file).is_file() for file in (SINGLE, INDEX))
    if has_weights:
        return Checkpoint(folder).config
    options = quantization_of(read_json(folder / "config.json"))
    return with_formats(read_folder_config(folder), options)


def _local_folder(name: str, needs_weights: bool = False) -> Path:
    folder = Path(name).expanduser()
    if folder.exists():
        if not folder.is_dir() and folder.suffix != ".gguf":
            raise CheckpointError(
                f"{folder} is not a folder; pass the folder of config.json, or a .gguf file"
            )
        return only_gguf(folder) or transformer_folder(folder)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{name} does not exist; pass a Hugging Face folder or a Hub id{_guess(name)}"
        )
    if not needs_weights:
        return _from_hub(name, HUB_FILES)
    folder = _from_hub(name, (*HUB_FILES, SINGLE))  # which comes before an index
    if (folder / SINGLE).is_file():
        return folder
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            f"{name} has no safetensors on the hub: get its .bin files with `hf download {name} "
            "--local-dir SRC`, install PyTorch, run `flexgen-jax convert SRC DST`, and give "
            "--model DST"
        )
    return _from_hub(name, (*HUB_FILES, *indexed_names(folder)))


def _guess(name: str) -> str:
    """Returns a guess at the intended model or folder, as the end of a sentence."""
    base_name = Path(name).name.lower()
    shapes = [full for full in SHAPES if base_name in full.lower()]
    by_end = {full.split("/")[1].lower(): full for full in SHAPES}
    shapes += [by_end[end] for end in difflib.get_close_matches(base_name, by_end, 1)]
    folder = Path(name).expanduser().parent
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    near_folders = [
        str(folder / close) for close in difflib.get_close_matches(Path(name).name, names, 1)
    ]
    guesses = [*near_folders, *dict.fromkeys(shapes)][:3]
    return f". Did you mean {' or '.join(guesses)}?" if guesses else "."


def _from_hub(name: str, patterns: Sequence[str]) -> Path:
    """Returns the folder of a hub's model, with the files that match `patterns`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(patterns), ignore_patterns=list(HUB_LEFT_OUT)
            )
        )
    except Exception as error:  # the hub raises many kinds of network errors
        raise CheckpointError(
            f"{name} is not a local folder, and could not be fetched from the Hub "
            f"({type(error).__name__}: {first_line(error)}){_guess(name)} Check the spelling and "
            f"the network; or, on a machine with a network, run `hf download {name} --local-dir "
            "FOLDER`, copy FOLDER here, and give --model FOLDER"
        ) from None


def resolve_dtype(dtype: str, config: ModelConfig, on_cpu: bool) -> str:
    """Returns the dtype to compute in; "auto" stands for the checkpoint's dtype.

    On the CPU, "auto" takes bfloat16 instead of float16, which multiplies much more slowly there.
    Raises `UserError` for an unknown dtype.
    """
    if dtype == "auto":
        return "bfloat16" if on_cpu and config.dtype == "float16" else config.dtype
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; choose auto or one of {list(DTYPES)}")
    return dtype
