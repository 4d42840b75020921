"""Options of `LLM`, the command line, its configuration file and environment variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from flexgen_jax.errors import UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.formats.known import WEIGHT_FORMATS, WeightFormat
from flexgen_jax.models.formats.storage import BITS, MATMUL_BITS
from flexgen_jax.models.loading import Model, open_model
from flexgen_jax.policy.policy import ATTENTIONS, MAX_DRAFT, Attention, Policy
from flexgen_jax.progress import Bars
from flexgen_jax.units import parse_bytes

DRAFT_TOKENS = 4
"""Tokens that are guessed for a pass where nobody says how many."""

LOOKUP, SELF_4BIT = "lookup", "self-4bit"
"""What may guess tokens, besides a model."""


MODEL, MEMORY, PRECISION = "Model", "Memory and machines", "Precision and attention"
"""Headings of the options' flags in --help."""


def option(default: Any, heading: str, text: str, **flag: Any) -> Any:
    """A field that is also a flag of the command line, of the same name.

    text: the flag's help. flag: how its value is written: `choices`; `type`, int, float, "size" or
    "path", an int from `minimum` to `maximum`; `is_switch` for --name/--no-name; or `is_multiple`
    for a flag that may be repeated. metavar: as of click.
    """
    return field(default=default, metadata={"heading": heading, "help": text, **flag})


def bits_of(tensors: str) -> dict[str, Any]:
    """The help and the choices of a number of bits."""
    text = (
        f"Bits of {tensors}; 16 is the dtype itself. 4 bits: 28 % of the memory and traffic, at a "
        "small loss of quality."
    )
    return {"text": text, "choices": BITS}


class LLMOptions(TypedDict, total=False):
    """The keywords of `LLM`: the fields of `EngineOptions` without `model`."""

    dummy_weights: bool
    adapter: str | Path | Sequence[str | Path] | None
    dtype: str
    seed: int
    progress: Bars
    device_memory: str | int | None
    host_memory: str | int | None
    disk_space: str | int | None
    write_limit: str | int | None
    kv_store: str | int | None
    kv_store_dir: str | Path | None
    offload_dir: str | Path | None
    stages: int
    coordinator: str | None
    policy: Policy | Literal["auto"]
    weight_bits: int | None
    requantize: bool
    weight_format: WeightFormat | None
    cache_bits: int | None
    matmul_bits: int | None
    attention: Attention | None
    attention_sparsity: float | None
    prefill_chunk: int | None
    draft: str | Path | Model | None
    draft_tokens: int | None
    prefix_sharing: bool
    unified: bool | None
    hardware: str | Path | None
    breakdown: bool
    trace: str | Path | None
    sets_up_jax: bool


@dataclass(frozen=True)
class EngineOptions:
    """The model, the placement of its data, and its budgets.

    Options with a help text are also flags of the commands, of the same name.
    """

    # Also a `Model` of arrays in memory.
    model: str | Path | Model | None = option(
        None,
        MODEL,
        "Hugging Face folder, Hub id or GGUF file; default: a toy model of 5 million parameters.",
    )
    dummy_weights: bool = option(
        False,
        MODEL,
        "Use random weights. --model is then a known shape such as facebook/opt-1.3b (see "
        "`flexgen-jax models`), or a folder.",
    )
    # Of several adapters, texts choose by name.
    adapter: str | Path | Sequence[str | Path] | None = option(
        None,
        MODEL,
        "Folder of a LoRA adapter of peft, which applies to all texts. With NAME=PATH, once or "
        "several times, only texts that ask for the name use it.",
        is_multiple=True,
        metavar="[NAME=]PATH",
    )
    # "auto" uses bfloat16 for a float16 checkpoint on a CPU.
    dtype: str = option(
        "auto",
        MODEL,
        "Dtype of compute and storage; auto: the checkpoint's.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    # Of random weights; sampling has the seeds of `SamplingParams`.
    seed: int = option(0, MODEL, "Random seed.", type=int, minimum=0)
    # "placing" shows the bars of loading, but not of tokens.
    progress: Bars = option(
        False, MODEL, "Show a progress bar; default: on a terminal.", is_switch=True
    )
    # Budgets in bytes or as "16GB". With several stages, each stage's.
    device_memory: str | int | None = option(
        None, MEMORY, "GPU memory budget, e.g. 16GB; default: the free memory.", type="size"
    )
    host_memory: str | int | None = option(
        None, MEMORY, "RAM budget, e.g. 64GB; default: the free memory.", type="size"
    )
    disk_space: str | int | None = option(
        None, MEMORY, "Disk budget, e.g. 1TB; default: the free space.", type="size"
    )
    # Weights, which are stored once, do not count.
    write_limit: str | int | None = option(
        None,
        MEMORY,
        "Limit on bytes written to disk per day, e.g. 200GB; policies that exceed it are rejected.",
        type="size",
    )
    kv_store: str | int | None = option(
        None,
        MEMORY,
        "Keep the KV cache of prompts on disk, up to this size, e.g. 20GB; later requests with the "
        "same prefix reuse it.",
        type="size",
    )
    kv_store_dir: str | Path | None = option(
        None, MEMORY, "Folder of --kv-store; default: ~/.cache/flexgen_jax/kv.", type="path"
    )
    offload_dir: str | Path | None = option(
        None,
        MEMORY,
        "Folder on a fast disk for offloaded data; weights stay there for later runs. Default: "
        "~/.cache/flexgen_jax/offload.",
        type="path",
    )
    stages: int = option(
        1,
        MEMORY,
        "Number of pipeline stages, each a process with its own GPU or share of cores; budgets "
        "apply to each.",
        type=int,
        minimum=1,
    )
    coordinator: str | None = option(
        None,
        MEMORY,
        "Listen here for stages on other machines (`flexgen-jax stage`). Under srun or mpirun, the "
        "first process leads.",
        metavar="HOST:PORT",
    )
    # A `Policy`, or "auto" to search one for each workload. Before a long run, the search probes
    # this machine for some seconds, once.
    policy: Policy | Literal["auto"] = "auto"
    # These seven change the policy; None keeps its value. A checkpoint that is published in few
    # bits keeps its own weights by default.
    weight_bits: int | None = option(None, PRECISION, **bits_of("weights"))
    requantize: bool = option(
        False,
        PRECISION,
        "Allow --weight-bits for a checkpoint that is already quantized (FP8, GPTQ, ...), at some "
        "loss of quality.",
    )
    weight_format: WeightFormat | None = option(
        None,
        PRECISION,
        "Groups for --weight-bits: own (32 along the input, default) or paper (64 along the "
        "output, less accurate).",
        choices=WEIGHT_FORMATS,
    )
    cache_bits: int | None = option(None, PRECISION, **bits_of("full blocks of the KV cache"))
    matmul_bits: int | None = option(
        None,
        PRECISION,
        "8: matmul with 8-bit integers, at a small loss of quality. Faster on some CPUs: see the "
        "page on CPU kernels.",
        choices=MATMUL_BITS,
    )
    attention: Attention | None = option(
        None,
        PRECISION,
        "Where to attend to KV cache that is not on the GPU. host: on the CPU; device: copy the "
        "cache; auto: the better one in a search.",
        choices=ATTENTIONS,
    )
    attention_sparsity: float | None = option(
        None,
        PRECISION,
        "In decoding, attend to this fraction of the tokens with the highest scores, e.g. 0.1, at "
        "a loss of quality.",
        type=float,
        metavar="F",
    )
    prefill_chunk: int | None = option(
        None,
        PRECISION,
        "Tokens per prefill chunk. Smaller chunks need less memory and more passes over the "
        f"weights. Default: {Policy().prefill_chunk}, or less if a plan needs it.",
        type=int,
        minimum=1,
        metavar="TOKENS",
    )
    # A draft model, named as `model` is, needs the same tokens and lies on the device as a whole.
    draft: str | Path | Model | None = option(
        None,
        PRECISION,
        "Speculative decoding with drafts from lookup (repeated text), self-4bit (the model in 4 "
        "bits), or a smaller model.",
        metavar="lookup|self-4bit|MODEL",
    )
    draft_tokens: int | None = option(
        None,
        PRECISION,
        f"With --draft, maximum number of draft tokens per pass. Default: {DRAFT_TOKENS}.",
        type=int,
        minimum=1,
        maximum=MAX_DRAFT,
        metavar="K",
    )
    prefix_sharing: bool = option(
        True, PRECISION, "Compute common prefixes of prompts once.", is_switch=True
    )
    # Whether host and device are one RAM; None: on a CPU.
    unified: bool | None = None
    # The profile to plan with: a file or a known machine's name; None is this machine's.
    hardware: str | Path | None = None
    # Whether the report has the busy time of the device and of its links, at a cost in speed.
    breakdown: bool = False
    # A file for a timeline of all transfers and computations, for ui.perfetto.dev.
    trace: str | Path | None = None
    # Whether `set_up_jax` is called: JAX keeps compiled programs for later processes, and uses most
    # of a GPU's memory.
    sets_up_jax: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.stages, int) or self.stages < 1:
            raise UserError(f"stages must be at least 1, not {self.stages!r}")
        if self.coordinator is not None and self.stages == 1:
            raise UserError("a coordinator needs several stages: add --stages N (stages=N)")
        if self.draft_tokens is not None and self.draft is None:
            raise UserError('draft_tokens needs a drafter, for example draft="lookup"')
        if self.draft is not None and self.stages > 1:
            raise UserError("draft cannot be combined with stages")
        if self.policy != "auto" and not isinstance(self.policy, Policy):
            raise UserError(
                f'policy must be "auto" or a Policy, e.g. Policy.from_percent(...), not '
                f"{self.policy!r}"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """All options by name, as `LLM` takes them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def budgets(self) -> tuple[int | None, int | None, int | None]:
        """Bytes of device memory, host memory and disk; raises `UserError` for no size."""
        return (
            parse_bytes(self.device_memory, "device_memory"),
            parse_bytes(self.host_memory, "host_memory"),
            parse_bytes(self.disk_space, "disk_space"),
        )

    @property
    def is_auto(self) -> bool:
        """Whether the policy is searched."""
        return self.policy == "auto"

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of the policy that are given apart from it."""
        values = {name: getattr(self, name) for name in CHANGES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def base_policy(self) -> Policy:
        """The policy with these changes; where it is searched, what the search starts from."""
        policy = replace(Policy() if self.policy == "auto" else self.policy, **self.changes)
        if self.draft is None:
            return policy
        count = DRAFT_TOKENS if self.draft_tokens is None else self.draft_tokens
        return replace(policy, draft_tokens=count)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters, each "PATH" or "NAME=PATH"."""
        given = () if self.adapter is None else self.adapter
        return (str(given),) if isinstance(given, str | Path) else tuple(map(str, given))

    def open_model(self) -> Model:
        """Opens the model; raises `UserError` if that is not possible."""
        if self.stages > 1 and isinstance(self.model, Model):
            raise UserError("stages need a model in a folder, which other processes can open")
        return open_model(
            name=self.model,
            dummy_weights=self.dummy_weights,
            seed=self.seed,
            weight_bits=self.weight_bits,
            requantizes=self.requantize,
            adapters=self.adapters,
        )

    def policy_on(self, unified: bool, config: ModelConfig) -> Policy:
        """The policy of a model's run where host and device are one RAM, or are not."""
        policy = self.base_policy
        if config.published is not None and self.weight_bits is None:
            policy = replace(policy, weight_bits=config.published.bits)
        if not self.is_auto and unified and policy.attention == "auto" and not policy.is_sparse:
            return replace(policy, attention="device")  # the same memory, and one program a step
        return policy


CHANGES = (
    "weight_bits",
    "cache_bits",
    "matmul_bits",
    "weight_format",
    "attention",
    "attention_sparsity",
    "prefill_chunk",
)
"""Options that change a policy and fix none: the search continues with them."""
